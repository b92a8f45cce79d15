"""The documents as tests read them: fenced blocks, commands and what they print.

A ```console block is a terminal: lines after `$ ` are typed (a `\\` at the end goes on), `^C` is Ctrl-C, the rest is
printed. `...` in it stands for anything. Every ```console, ```python and ```toml block is run, unless its first line
begins with `# untested`, where a reader sees it too. HTML comments above a block steer: `<!-- test: make -->` (its
targets exist), `<!-- test: stop -->` (end all servers), `<!-- test: PD_X=y -->` (environment, to the end of the block).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md", "SECURITY.md", "CHANGELOG.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md"))),
)  # fmt: skip
RUN = ("console", "python", "toml")
SHOWN = ("", "text", "json")  # never typed

_FENCE = re.compile(r"```(\S*)\s*$")
_NOTE = re.compile(r"<!-- test: (.+) -->\s*$")
_SERVERS = ("pd up", "pd-node", "pd gateway")
_ANY = "..."

# What differs from run to run, or with the model, is as good as equal.
_LOOSE = (
    (re.compile(r'("(?:content|text|model|finish_reason)":)(?:"(?:[^"\\]|\\.)*"|null)'), r'\1"*"'),
    (re.compile(r"^(model|engine) +\S+"), r"\1 *"),
    (re.compile(r"\b[0-9a-f]{6,}\b"), "#"),
    (re.compile(r"(?<![\w-])\d+(?:\.\d+)?"), "#"),  # but not in names: prefill-1
    (re.compile(r"\s+"), " "),
)
_PORT = re.compile(r"127\.0\.0\.1:(\d+)")
_ID = re.compile(r"cmpl-([0-9a-f]{32})")


@dataclass
class Block:
    """One fenced block. `line` is that of its first line in the document."""

    document: str
    line: int
    language: str
    lines: list[str]
    notes: list[str]

    @property
    def where(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def untested(self) -> bool:
        return self.lines[:1] != [] and self.lines[0].startswith("# untested")


@dataclass
class Typed:
    """One command, and the lines that follow it in the document."""

    command: str
    expected: list[str] = field(default_factory=list)

    @property
    def is_server(self) -> bool:
        return self.command.startswith(_SERVERS)


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str) -> list[Block]:
    found: list[Block] = []
    notes: list[str] = []
    open_block: Block | None = None
    for number, line in enumerate(text_of(document).splitlines(), 1):
        fence = _FENCE.match(line.strip())
        if open_block is not None and fence and not fence[1]:
            found.append(open_block)
            open_block, notes = None, []
        elif open_block is not None:
            open_block.lines.append(line)
        elif fence:
            open_block = Block(document, number + 1, fence[1], [], notes)
        elif note := _NOTE.match(line.strip()):
            notes.append(note[1])
    assert open_block is None, f"{document}: a block is not closed"
    return found


def typed(block: Block) -> list[Typed]:
    """What is typed, in order; `^C` is a command of its own."""
    commands: list[Typed] = []
    lines = iter(block.lines)
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command = command[:-1] + next(lines).strip()
            commands.append(Typed(command))
        elif line == "^C":
            commands.append(Typed(line))
        elif commands:
            commands[-1].expected.append(line)
        else:
            raise AssertionError(f"{block.where}: a console block begins with `$ `, not {line!r}")
    return commands


class Names:
    """What the document calls a port or a request, and what it really is in this run."""

    def __init__(self) -> None:
        self.real: dict[str, str] = {}

    def put_in(self, text: str) -> str:
        """`text` with every known name replaced."""
        return re.sub(r"\b(?:\d{4,5}|[0-9a-f]{32})\b", lambda m: self.real.get(m[0], m[0]), text)

    def learn(self, expected: str, actual: str) -> None:
        for pattern in (_PORT, _ID):
            for said, was in zip(pattern.findall(expected), pattern.findall(actual), strict=False):
                self.real[said] = was


def loosened(text: str) -> str:
    for pattern, by in _LOOSE:
        text = pattern.sub(by, text)
    return text.strip()


def fits(expected: str, actual: str) -> bool:
    """Whether a printed line is what the document says, but for `...` and what is never the same."""
    parts = [re.escape(loosened(part)) for part in expected.split(_ANY)]
    return re.fullmatch(r"\s*.*".join(parts), loosened(actual)) is not None


def first_missing(expected: list[str], actual: list[str], names: Names) -> str:
    """The first expected line that does not come, in order; '' when all do. Lines in between do not matter where the
    document has a line of `...` alone, or where it shows nothing."""
    at, gap = 0, False
    for line in expected:
        if not line.strip():
            continue
        if line.strip() == _ANY:
            gap = True
            continue
        rest = [i for i in range(at, len(actual)) if actual[i].strip()]
        hit = next((i for i in (rest if gap else rest[:1]) if fits(line, actual[i])), None)
        if hit is None:
            return line
        names.learn(line, actual[hit])
        at, gap = hit + 1, False
    return ""
