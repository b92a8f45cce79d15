"""The page of a load: everything in it, nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from pdbus.nodes.replay.load_html import page
from pdbus.nodes.replay.load_view import headlines, show

from tests.load_page import load_made

VOID = ("meta",)


class Strict(HTMLParser):
    """Fails on a tag that is not closed, keeps text and what tags refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.refers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.refers += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(html: str) -> Strict:
    parser = Strict()
    parser.feed(html)
    assert parser.open == []
    return parser


def test_all_figures_charts_and_failures_are_in_it() -> None:
    run, result = load_made()
    html = page(run, result)
    text = " ".join(parsed(html).text)
    for said in (*headlines(result).values(), "a <b> trace.jsonl", "something to know", "<gone>", "overloaded", "d2"):
        assert said in text, said
    for chart in ("Time to first token", "Whole answer", "Between tokens", "Lateness of sending", "Requests",
                  "Tokens of answers", "In flight", "Prefix hits", "Lateness", "Failures by cause"):  # fmt: skip
        assert f"<figcaption>{chart}</figcaption>" in html
    assert html.count("<svg") == html.count("</svg>") == 10


def test_it_needs_nothing_from_elsewhere() -> None:
    html = page(*load_made())
    assert parsed(html).refers == []
    assert not re.search(r"https?:|url\(|@import|<script|<link|<img|<iframe", html)


def test_a_load_without_failures_has_no_such_part() -> None:
    html = page(*load_made(failing=False))
    assert "Failures" not in html and html.count("<svg") == 9


def test_people_read_the_same_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    _, result = load_made()
    show(result)
    said = capsys.readouterr().out
    assert f"100: {result['completed']} completed, {result['failed']} failed" in said
    for part in ("first token, from sent", "first token, from scheduled", "p99", "failures", "overloaded", "<gone>"):
        assert part in said
