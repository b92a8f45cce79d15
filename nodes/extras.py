"""What `pip install pdbus` alone does not bring: who needs it is told so in one line, before anything is started."""

from __future__ import annotations

from importlib.util import find_spec

from pdbus.bus.errors import ConfigError
from pdbus.connector.flavours import NIXL_FLAVOURS

INSTALL = "pip install 'pdbus[node]'"
# Of pdbus[node] and pdbus[http], which it includes; as they are imported.
EXTRAS = (
    "numpy", "torch", "safetensors", "gguf", "nixl", *NIXL_FLAVOURS,
    "starlette", "uvicorn", "tokenizers", "jinja2", "llguidance", "prometheus_client",
)  # fmt: skip
OF_ENGINE = {"coded": ("numpy",), "torch": ("numpy", "torch", "safetensors")}


def need_node(setting: str, engine: str = "torch") -> None:
    """Raises ConfigError naming `setting` and the first package that a node with this engine lacks."""
    missing = [name for name in OF_ENGINE[engine] if find_spec(name) is None]
    if not any(find_spec(flavour) for flavour in NIXL_FLAVOURS):
        missing.append("nixl")
    if missing:
        raise ConfigError(setting, lacks(missing[0]))


def lacks(package: str) -> str:
    return f"needs the package {package}, which is not installed: {INSTALL}"
