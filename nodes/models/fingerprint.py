"""Do two nodes serve the same weights? A digest of the configuration and of samples of the tensors as stored."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import xxhash

from pdbus.bus.wire import encode, replace

from .checkpoint import ITEM_BYTES, StoredTensor, open_checkpoint
from .config import read_config

SAMPLES = 16  # per tensor, evenly spaced
SAMPLE_BYTES = 256
FLOAT16_LOST_BITS = (1 << 13) - 1  # of a float32's, those that a float16 has not


def weights_fingerprint(
    folder: str | Path, dtype: str = "float32", weights: str = "auto", *, bitwise: bool = False
) -> str:
    """32 hex digits over the canonical configuration, each tensor's (name, shape, dtype, sampled bytes), and `dtype`.

    The tensors are taken as stored, so slicing over ranks does not matter; `dtype`, what they are cast to at load,
    does. So does `weights` where it rounds: for fp16 and a checkpoint in float32 that was never of a smaller type;
    with `bitwise` always, for each form adds in another order.
    Special tokens are left out: they change when a request ends, not what is computed.
    Raises ConfigError naming `--model` when the folder cannot be read.
    """
    folder = Path(folder)
    digest = xxhash.xxh3_128()
    digest.update(encode(replace(read_config(folder), bos_ids=(), eos_ids=())))
    digest.update(dtype.encode())
    if bitwise:
        digest.update(weights.encode())
    rounded = False
    for name, tensor in open_checkpoint(folder).items():
        digest.update(f"{name} {tensor.shape} {tensor.dtype} ".encode())
        for sample in _samples(tensor):
            digest.update(sample)
            rounded = rounded or (weights == "fp16" and _rounds(tensor, sample))
    if rounded:
        digest.update(b"fp16")
    return digest.hexdigest()


def _rounds(tensor: StoredTensor, sample: bytes) -> bool:
    """Are there float32 weights of a matrix that are no float16 numbers?"""
    return tensor.dtype == "F32" and len(tensor.shape) == 2 and any(w & FLOAT16_LOST_BITS for w in array("I", sample))


def _samples(tensor: StoredTensor) -> list[bytes]:
    """All of a small tensor; of a large one SAMPLES pieces that include its first and its last bytes."""
    fd = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if tensor.size <= SAMPLES * SAMPLE_BYTES:
            return [os.pread(fd, tensor.size, tensor.offset)]
        items, room = ITEM_BYTES[tensor.dtype], tensor.size - SAMPLE_BYTES
        starts = [room * i // (SAMPLES - 1) // items * items for i in range(SAMPLES)]
        return [os.pread(fd, SAMPLE_BYTES, tensor.offset + start) for start in starts]
    finally:
        os.close(fd)
