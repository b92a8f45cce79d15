"""Certificates for tests, made by the `openssl` command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Files(NamedTuple):
    cert: Path
    key: Path


def certificate(folder: Path, name: str = "node") -> Files:
    """Signed by itself, good for localhost and 127.0.0.1, with a key that nobody else can read."""
    files = Files(folder / f"{name}.pem", folder / f"{name}.key")
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-out", str(files.cert), "-keyout", str(files.key),
    )  # fmt: skip
    files.key.chmod(0o600)
    return files


def openssl(*words: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command on this machine")
    subprocess.run(("openssl", *words), check=True, capture_output=True)
