"""What the documents list is what the code has: settings, messages, tables, timers, fields of status, links."""

from __future__ import annotations

import inspect
import re
import runpy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdbus.bus import frames, known, wire
from pdbus.bus.members import MembershipConfig
from pdbus.bus.messages import MESSAGES, Hello
from pdbus.connector import attempt, offered, transfer
from pdbus.connector.handoff import Cause, HandoffConfig
from pdbus.nodes import circuits, core, intake, limits, report
from pdbus.nodes.http import stream
from pdbus.nodes.http.node_metrics import ALIASES, vllm_gauges
from pdbus.nodes.measures import Measures

from tests.docs_blocks import DOCUMENTS, ROOT, text_of
from tests.docs_wire import DOCUMENTED, rows

S = 1_000_000_000


def tables(document: str) -> Iterator[tuple[str, list[list[str]]]]:
    """(the heading above, rows without the first two lines) of every table."""
    heading, lines = "", list[list[str]]()
    for line in [*text_of(document).splitlines(), ""]:
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif lines:
            yield heading, lines[2:]
            lines = []
        if line.startswith("#"):
            heading = line.lstrip("# ").strip("`")


def table(document: str, heading: str) -> list[list[str]]:
    return next(found for at, found in tables(document) if at == heading)


def test_the_table_of_settings_is_that_of_the_code() -> None:
    """`python docs/settings.py` prints it anew."""
    made = runpy.run_path(str(ROOT / "docs/settings.py"))["table"]()
    start, end = "<!-- settings: python docs/settings.py -->\n", "\n<!-- end of settings -->"
    assert text_of("docs/operating.md").partition(start)[2].partition(end)[0] == made


def test_every_message_and_part_is_documented_once() -> None:
    titles = re.findall(r"^### `?([\w.]+)`?$", text_of("docs/protocol.md"), re.M)
    assert sorted(t for t in titles if t in DOCUMENTED) == sorted(DOCUMENTED)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_fields_types_and_defaults_are_those_of_the_code(name: str) -> None:
    section = re.split(rf"^### `?{re.escape(name)}`?$", text_of("docs/protocol.md"), flags=re.M)[1].partition("\n#")[0]
    said = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| .+ \|$", section, re.M)
    assert said == rows(DOCUMENTED[name])
    assert said or "No fields." in section


def test_golden_bytes_exist_for_every_kind() -> None:
    """The page promises that they never change."""
    golden = (ROOT / "tests/wire/golden.json").read_text()
    assert all(f'"{kind}"' in golden for kind in MESSAGES)


@pytest.mark.parametrize(
    ("heading", "transitions"),
    [
        ("A prompt on P", offered.TRANSITIONS),
        ("A fetch on D", attempt.TRANSITIONS),
        ("A read on D", transfer.TRANSITIONS),
        ("A circuit on D", circuits.TRANSITIONS),
        ("A member", known.PEERS),
    ],
)
def test_state_tables_are_those_of_the_machines(heading: str, transitions: dict[tuple[Any, Any], Any]) -> None:
    said = {(row[0], row[1]): row[2] for row in table("docs/protocol.md", heading)}
    assert said == {(str(state), str(heard)): str(after) for (state, heard), after in transitions.items()}


def test_failures_of_an_attempt_are_those_of_the_machine() -> None:
    said = [found for at, found in tables("docs/protocol.md") if at == "A fetch on D"][1]
    yes = {True: "yes", False: "no"}
    assert said == [
        [str(why), " and ".join(f.states), yes[f.cancel], yes[f.suspect]] for why, f in attempt.FAILURES.items()
    ]


def test_causes_of_a_leases_end_are_listed() -> None:
    said = text_of("docs/protocol.md").partition("A lease ends for one of: ")[2].partition(".")[0]
    assert re.findall("`(.+?)`", said) == [cause.value for cause in Cause]


def test_timers_are_the_defaults() -> None:
    m, h = MembershipConfig(name="n", incarnation=b"i", hello=Hello(role="tool")), HandoffConfig()
    claims_ns = h.claim_ns * (1 + h.claim_repeats)
    wanted = {
        "heartbeat": m.heartbeat_ns, "suspect": m.suspect_ns, "dead": m.dead_ns, "cut": m.cut_ns,
        "handshake": m.handshake_ns, "refused": m.refused_retry_ns, "lease": h.lease_ns, "renew": h.renew_ns,
        "answer": h.answer_ns, "claim": h.claim_ns, "not renewed": h.lease_ns - claims_ns, "read": h.read_floor_ns,
        "tombstone": h.tombstone_ns, "removal": m.removal_ns, "retired": m.retired_ns, "drain": core.DRAIN_NS,
        "last": circuits.LAST_NS,
    }  # fmt: skip
    said = {row[0]: row[1] for row in table("docs/protocol.md", "Timers")}
    backoff = f"{m.backoff_ns // 1_000_000} ms to {m.backoff_max_ns // S} s"
    circuit = f"{circuits.OPEN_NS // S} s to {circuits.OPEN_MAX_NS // S} s"
    in_seconds = {name: f"{ns // S} s" for name, ns in wanted.items()}
    assert said == {**in_seconds, "back-off": backoff, "circuit": circuit}


def test_limits_are_those_of_the_code() -> None:
    said = " ".join(cell for row in table("docs/operating.md", "Limits") for cell in row)
    h, m = HandoffConfig(), MembershipConfig(name="n", incarnation=b"i", hello=Hello(role="tool"))
    for wanted in (
        f"{wire.FRAME_BYTES_MAX >> 20} MiB in all frames, {wire.FRAMES_MAX} frames",
        f"header {frames.HEADER_BYTES_MAX >> 10} KiB",
        f"{stream.BODY_BYTES_MAX >> 20} MiB, {stream.BODY_S:.0f} s",
        f"{core.CoreConfig.__struct_defaults__[-3]:,}; one more",
        f"answered {intake.ANSWERS_MAX:,}",
        f"{core.ATTEMPTS_MAX}, each at another",
        f"{h.leases_max:,}, as long",
        f"{h.tombstones_max:,}, for {h.tombstone_ns // S} s",
        f"{m.peers_max:,} each; {m.handshakes_max} handshakes",
        f"{limits.STOPS_MAX} of at most {limits.STOP_CHARS_MAX:,} characters; {limits.STOP_IDS_MAX:,} stop token ids",
        f"{limits.LOGPROBS_MAX} alternatives",
    ):
        assert wanted in said, wanted


@pytest.mark.parametrize(
    ("made_by", "heading"),
    [
        (intake.Intake._status, "Status"),
        (report.peers, "Status"),
        (report._request, "Status"),
        (offered.Offer.row, "Status"),
        (attempt.Fetch.row, "Status"),
        (report.ledger, "Ledger"),
    ],
)
def test_every_field_of_status_is_explained(made_by: Callable[..., Any], heading: str) -> None:
    """By the keys that stand in its source: a row may be empty on an idle node."""
    section = re.split(rf"^## {heading}$", text_of("docs/operating.md"), flags=re.M)[1].partition("\n## ")[0]
    keys = re.findall(r'"(\w+)":', inspect.getsource(made_by))
    assert keys
    missing = [key for key in keys if not re.search(rf"\b{key.replace('_', '[_ ]')}\b", section)]
    assert missing == []


def test_every_metric_of_a_node_is_explained() -> None:
    section = text_of("docs/operating.md").partition("## Metrics")[2].partition("\n## ")[0]
    for key in re.findall(r'"(\w+)":', inspect.getsource(report.metrics)):
        assert f"pdbus_{key}" in section or f"`_{key.removeprefix('kv_blocks_')}`" in section, key


def test_every_family_of_metrics_and_every_name_of_vllm_is_explained() -> None:
    section = text_of("docs/operating.md").partition("## Metrics")[2].partition("\n## ")[0]
    names = [name + "_total" * (kind == "counter") for name, kind, _, _ in Measures().families()]
    names += re.findall(r"\{PREFIX\}(\w+)", inspect.getsource(report.families))
    names += [f"vllm:{name}" for name in (*ALIASES, *vllm_gauges(defaultdict(float)), "num_preemptions")]
    assert [name for name in names if name not in section] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text_of(document)):
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.is_file(), f"{document}: {target}"
        assert not anchor or anchor in anchors(file.read_text()), f"{document}: {target}"


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
