"""The timeline in a real browser: it is drawn, zooms, moves, tells of a request, and asks for nothing."""

from __future__ import annotations

import json
import re
import subprocess
from html import unescape
from typing import Any

import pytest

from pdbus.nodes.replay.files import opened
from pdbus.nodes.replay.timeline.page import page

from .test_load_browser import OPTIONS, browser
from tests.sim.cluster_sim import Plan
from tests.sim.recorded import record

pytestmark = pytest.mark.live

# Someone at the mouse, and what they see after each thing they do.
VISITOR = """<script>
addEventListener("load", () => {
  const seen = [], canvas = document.getElementById("canvas");
  const look = what => seen.push({ what, ...document.body.dataset });
  const pixels = () => new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data).size;
  const pointer = (type, clientX, clientY) => canvas.dispatchEvent(new PointerEvent(type, { clientX, clientY }));
  const at = ({ bar, top }) => {
    const box = canvas.getBoundingClientRect();
    return [box.left + (toX(bar[BEGIN]) + toX(bar[END])) / 2, box.top + top - view.top + 5];
  };
  const click = where => { pointer("pointerdown", ...where); pointer("pointerup", ...where); };
  look("whole");
  const lasts = ({ bar }) => bar[END] - bar[BEGIN];
  const [longest] = bars.filter(b => b.group.name === "requests").sort((a, b) => lasts(b) - lasts(a));
  const [x, y] = at(longest);
  const before = toUs(x - canvas.getBoundingClientRect().left);
  canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -600, clientX: x, clientY: y, cancelable: true }));
  look("zoomed");
  seen.at(-1).slipped = Math.abs(toUs(x - canvas.getBoundingClientRect().left) - before);
  const begin = view.begin;
  pointer("pointerdown", 700, 300); pointer("pointermove", 600, 300); pointer("pointerup", 600, 300);
  look("dragged");
  seen.at(-1).moved = view.begin - begin;
  document.getElementById("whole").click();
  look("whole again");
  click(at(longest));
  look("clicked");
  seen.at(-1).story = document.querySelectorAll("#story tr").length;
  pointer("pointermove", ...at(longest));
  seen.at(-1).tip = document.getElementById("tip").textContent;
  search.value = "";
  search.dispatchEvent(new Event("input"));
  look("cleared");
  search.value = DATA.requests[DATA.requests.length - 1];
  search.dispatchEvent(new Event("input"));
  look("searched");
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
  look("escaped");
  Object.assign(seen[0], { colours: pixels(), fetched: performance.getEntriesByType("resource").length,
    wide: document.documentElement.scrollWidth > innerWidth });
  const out = document.createElement("pre");
  out.id = "seen"; out.textContent = JSON.stringify(seen);
  document.body.append(out);
});
</script></body>"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a visitor of a simulated cluster's page sees, by what they did."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        record(5, folder / "run", patch, Plan(requests=8))
    file = folder / "page.html"
    file.write_text(page(opened([folder / "run"]).recordings, []).replace("</body>", VISITOR), encoding="utf-8")
    profile = f"--user-data-dir={folder / 'profile'}"
    said = subprocess.run(
        [browser(), *OPTIONS, profile, "--window-size=1200,900", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    found = re.findall(r'<pre id="seen">(.*?)</pre>', said.stdout, re.S)
    assert found, said.stdout[-2000:] + said.stderr
    return {each["what"]: each for each in json.loads(unescape(found[0]))}


def test_all_is_drawn_and_nothing_is_fetched(seen: dict[str, dict[str, Any]]) -> None:
    whole = seen["whole"]
    assert int(whole["drawn"]) > 50 and whole["colours"] > 20
    assert (whole["fetched"], whole["wide"]) == (0, False)


def test_the_wheel_zooms_around_the_pointer(seen: dict[str, dict[str, Any]]) -> None:
    whole, zoomed = int(seen["whole"]["span"]), int(seen["zoomed"]["span"])
    assert zoomed < whole / 2
    assert seen["zoomed"]["slipped"] < zoomed / 1000
    assert int(seen["zoomed"]["drawn"]) < int(seen["whole"]["drawn"])


def test_dragging_moves_and_a_button_shows_all_again(seen: dict[str, dict[str, Any]]) -> None:
    assert seen["dragged"]["moved"] > 0 and seen["dragged"]["span"] == seen["zoomed"]["span"]
    assert seen["whole again"]["span"] == seen["whole"]["span"]


def test_a_click_tells_of_a_request_and_escape_forgets_it(seen: dict[str, dict[str, Any]]) -> None:
    clicked = seen["clicked"]
    assert re.fullmatch("[0-9a-f]{32}", clicked["chosen"])
    assert clicked["story"] > 5 and int(clicked["messages"]) > 3
    assert "requests: request" in clicked["tip"] and "decoding" in clicked["tip"]
    assert (seen["cleared"]["chosen"], seen["escaped"]["chosen"]) == ("", "")


def test_a_search_goes_to_the_request(seen: dict[str, dict[str, Any]]) -> None:
    searched = seen["searched"]
    assert searched["chosen"] and int(searched["span"]) < int(seen["whole"]["span"])
