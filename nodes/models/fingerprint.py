"""Do two nodes serve the same weights? A digest of the configuration and of samples of the tensors as stored."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from pdbus.bus.wire import encode, replace

from .checkpoint import StoredTensor, open_checkpoint
from .config import read_config

SAMPLES = 16  # per tensor, evenly spaced
SAMPLE_BYTES = 256


def weights_fingerprint(folder: str | Path, dtype: str = "float32") -> str:
    """32 hex digits over the canonical configuration, each tensor's (name, shape, dtype, sampled bytes), and `dtype`.

    The tensors are taken as stored, so slicing over ranks does not matter; `dtype`, what they are cast to at load,
    does. Special tokens are left out: they change when a request ends, not what is computed.
    Raises ConfigError naming `--model` when the folder cannot be read.
    """
    folder = Path(folder)
    digest = xxhash.xxh3_128()
    digest.update(encode(replace(read_config(folder), bos_ids=(), eos_ids=())))
    digest.update(dtype.encode())
    for name, tensor in open_checkpoint(folder).items():
        digest.update(f"{name} {tensor.shape} {tensor.dtype} ".encode())
        for sample in _samples(tensor):
            digest.update(sample)
    return digest.hexdigest()


def _samples(tensor: StoredTensor) -> list[bytes]:
    """All of a small tensor; of a large one SAMPLES pieces that include its first and its last bytes."""
    fd = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if tensor.size <= SAMPLES * SAMPLE_BYTES:
            return [os.pread(fd, tensor.size, tensor.offset)]
        room = tensor.size - SAMPLE_BYTES
        return [os.pread(fd, SAMPLE_BYTES, tensor.offset + room * i // (SAMPLES - 1)) for i in range(SAMPLES)]
    finally:
        os.close(fd)
