"""What a user said of a node's settings, and the values chosen so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdbus.bus.errors import ConfigError

Chosen = dict[str, Any]  # by setting
RIVALS = {"kv_blocks": "kv_memory", "kv_memory": "kv_blocks"}  # two ways to say one thing: the stronger source wins


@dataclass(frozen=True)
class Given:
    """What the user said: text by setting, and how each was written."""

    text: dict[str, str] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)

    def add(self, source: Mapping[str, tuple[str, str]]) -> None:
        """Settings (text, how written) of one source; what a stronger source has said stays."""
        taken = dict(self.text)
        for name, (text, written) in source.items():
            rival = RIVALS.get(name, "")
            if rival in source:
                raise ConfigError(written, f"give either it or {source[rival][1]}, not both")
            if name not in taken and rival not in taken:
                self.text[name], self.written[name] = text, written

    def error(self, problem: str, *names: str) -> ConfigError:
        """Blames the first of these settings that was given, or the first of all."""
        written = [self.written[name] for name in names if name in self.written]
        return ConfigError(written[0] if written else option(names[0]), problem)


def option(name: str) -> str:
    return "--" + name.replace("_", "-")
