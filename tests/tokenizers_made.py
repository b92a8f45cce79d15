"""Small tokenizers of the two manners that byte-wise models have, trained on the spot."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog", "Grüße aus Köln, 北京 и Москва", "👩‍👩‍👧 🎉🎉 naïve café"] * 4


def byte_level() -> Tokenizer:
    """A small byte-level BPE, whose tokens often end inside a character; its post-processor adds a first token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    bpe.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    bpe.enable_truncation(4)
    return bpe


def byte_fallback() -> Tokenizer:
    """A small BPE in SentencePiece's manner: spaces as part of words, unknown characters as single bytes."""
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    bpe.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog"] * 4,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False),
    )
    plain = json.loads(bpe.to_str())
    plain["added_tokens"] = [t for t in plain["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(plain))
