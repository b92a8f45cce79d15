"""Text that others have said, as it may stand in a log or on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """In one line, and without what moves a cursor or sets a colour: such characters are written as escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
