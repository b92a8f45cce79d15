"""A draft model beside a model: whether the two speak of the same tokens, and where its KV fits in. Imports no torch.

A block of KV has layers of one shape, those of the model. The draft model's KV lies in further layers of that shape
behind them, named after its weights: so it is read with the others by their names, whatever the order, the block size
or the ranks of a peer, and a pair whose draft models differ is refused at hello.

Such a layer has, for every token, cells as wide as a head of the draft model. One of its layers takes as many of them
as it has heads, K's before V's; several layers share one, or one takes several, as they fit.
"""

from __future__ import annotations

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pdbus.bus.errors import ConfigError
from pdbus.bus.wire import Declared

from .config import ModelConfig, ResolvedModel, resolve_model

OPTION = "--draft-model"


class DraftFit(Declared):
    """`together` of the draft model's layers lie in one layer of the cache, or each in `apart`: one of both is 1."""

    layers: int  # of the cache, that hold all of them
    together: int
    apart: int
    cells: int  # of the cache's layer, for a token
    taken: int  # of these by a layer of the draft model


def resolve_draft(name_or_path: str, model: ResolvedModel) -> tuple[ResolvedModel, DraftFit]:
    """Find the draft model and hold it against the model. Raises ConfigError naming `--draft-model`."""
    try:
        draft = resolve_model(name_or_path)
    except ConfigError as e:
        raise ConfigError(OPTION if e.setting == "--model" else e.setting, e.problem) from None
    _check_vocabularies(model, draft)
    return draft, fit(model.config, draft.config)


def fit(model: ModelConfig, draft: ModelConfig) -> DraftFit:
    """Raises ConfigError naming `--draft-model` where its heads do not fit into the model's."""
    if model.head_dim % draft.head_dim:
        problem = f"its heads have {draft.head_dim} channels, which do not divide the model's {model.head_dim}"
        raise ConfigError(OPTION, problem)
    cells = model.kv_parts * model.kv_heads * (model.head_dim // draft.head_dim)
    taken = draft.kv_parts * draft.kv_heads
    together, apart = max(1, cells // taken), -(-taken // cells)
    return DraftFit(
        layers=-(-draft.layers // together) * apart, together=together, apart=apart, cells=cells, taken=taken
    )


def _check_vocabularies(model: ResolvedModel, draft: ResolvedModel) -> None:
    """Tokenizers, not sizes: checkpoints of one family round the number of their rows up to different ones."""
    of_model, of_draft = _tokens(Path(model.folder)), _tokens(Path(draft.folder))
    if of_model == of_draft:
        return
    if len(of_model) != len(of_draft):
        problem = f"{draft.name} has {len(of_draft)} tokens, {model.name} has {len(of_model)}"
    else:
        pairs = zip_longest(sorted(of_model.items()), sorted(of_draft.items()))
        (id_, one), (other_id, other) = next((a, b) for a, b in pairs if a != b)
        problem = f"token {other_id} of {draft.name} is {other!r}, token {id_} of {model.name} is {one!r}"
    raise ConfigError(OPTION, f"{problem}: a draft model must have the same vocabulary")


def _tokens(folder: Path) -> dict[int, str]:
    """By id, from tokenizer.json. Raises ConfigError naming `--draft-model`."""
    try:
        raw = json.loads((folder / "tokenizer.json").read_bytes())
        found = _listed(raw["model"]["vocab"])
        return found | {int(added["id"]): str(added["content"]) for added in raw.get("added_tokens") or []}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(OPTION, f"cannot read the vocabulary of {folder}: {type(e).__name__}: {e}") from None


def _listed(vocab: Any) -> dict[int, str]:
    """Of a map of token to id, or of a list of (token, score)."""
    if isinstance(vocab, list):
        return {i: str(entry[0]) for i, entry in enumerate(vocab)}
    return {int(i): str(token) for token, i in vocab.items()}
