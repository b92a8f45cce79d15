"""The page of a load in a real browser: what is drawn there, and that it asks for nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pdbus.nodes.replay.load_html import page

from tests.load_page import load_made

pytestmark = pytest.mark.live

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000")

# Beside the page, for what only the browser knows: sizes as laid out, errors, what it fetched.
PROBE = """<script>
addEventListener("load", () => {
  const boxes = [...document.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect());
  const drawn = [...document.querySelectorAll("polyline")].filter(line => line.getTotalLength() > 0);
  document.body.dataset.charts = boxes.filter(box => box.width > 300 && box.height > 100).length;
  document.body.dataset.lines = drawn.length;
  document.body.dataset.fetched = performance.getEntriesByType("resource").length;
  document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth;
});
</script></body>"""


def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser is installed: one of {', '.join(BROWSERS)} would do")
    return found


def test_charts_are_drawn_and_nothing_is_fetched(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(*load_made()).replace("</body>", PROBE), encoding="utf-8")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    said = subprocess.run(
        [browser(), *OPTIONS, profile, "--window-size=1200,900", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    found = dict(re.findall(r'data-(\w+)="(\w+)"', said.stdout))
    assert (found.get("charts"), found.get("fetched"), found.get("wide")) == ("10", "0", "false"), said.stderr
    assert int(found["lines"]) >= 10
    assert "a &lt;b&gt; trace.jsonl" in said.stdout
