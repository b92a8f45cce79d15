"""Profiles, faults and blocks as they are written: right, or one clear message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdbus.bus.errors import ConfigError
from pdbus.bus.wire import to_plain
from pdbus.nodes.replay.simulate.asks import Hashes
from pdbus.nodes.replay.simulate.faults import Fault, parse_fault, show_fault
from pdbus.nodes.replay.simulate.plan import Options, plan_of
from pdbus.nodes.replay.simulate.profile import StepTimes, load_profile, save_profile, shipped
from pdbus.nodes.replay.workload import Asked, Workload

from tests.simulated import MS, PROFILE, S

TIMES = StepTimes(PROFILE)

# ---------------------------------------------------------------- profiles


def test_times_are_interpolated_between_lines_and_continued_beyond() -> None:
    assert TIMES.ns(1, 0, 0, 0) == 5 * MS and TIMES.ns(101, 0, 0, 0) == 15 * MS
    assert TIMES.ns(51, 0, 0, 0) == 10 * MS and TIMES.ns(201, 0, 0, 0) == 25 * MS
    assert TIMES.ns(101, 2000, 0, 0) == 17 * MS
    assert TIMES.ns(0, 0, 6, 1000) == pytest.approx(15.6 * MS)


def test_a_step_of_both_pays_once_for_what_every_step_costs() -> None:
    assert TIMES.ns(101, 0, 1, 0) == pytest.approx((15 + 10 - 4.9) * MS)


@pytest.mark.parametrize("name", shipped())
def test_profiles_that_ship_are_right_and_say_where_they_come_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert ("not measured" in profile.source) is name.startswith("estimate")


def test_a_saved_profile_is_read_back(tmp_path: Path) -> None:
    save_profile(PROFILE, tmp_path / "p.json")
    assert load_profile(str(tmp_path / "p.json")) == PROFILE


def plain() -> dict[str, Any]:
    return dict(json.loads(json.dumps(to_plain(PROFILE))))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"decode": []}, "decode has no line"),
        ({"decode": [[1, -5, 0]]}, "only finite numbers from 0 on"),
        ({"prefill": [[10, 5, 0], [10, 6, 0]]}, "sizes must rise"),
        ({"prefill": [[0, 5, 0]]}, "sizes must rise, from 1"),
        ({"prefill": [[1, 5]]}, "is no profile"),
        ({"link_gb_per_s": 0}, "link_gb_per_s is 0"),
        ({"read_ms": -1}, "read_ms is -1"),
        ({"speed": 9}, "`speed`"),
        ({"kv_bytes_per_token": "many"}, "`$.kv_bytes_per_token`"),
    ],
)
def test_a_wrong_profile_is_refused_by_its_field(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps({**plain(), **change}))
    with pytest.raises(ConfigError, match="--profile") as refused:
        load_profile(str(file))
    assert problem in str(refused.value) and str(file) in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_what_is_no_profile_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "p.json"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match="is no profile"):
        load_profile(str(file))


def test_a_missing_profile_names_those_that_ship(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="estimate-8b-80gb"):
        load_profile(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="cannot read"):
        load_profile(str(tmp_path))


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:p0@12.5s", Fault("kill", "p0", at_ns=12_500 * MS)),
        ("kill:d1@1m+5s", Fault("kill", "d1", at_ns=60 * S, for_ns=5 * S)),
        ("freeze:p1@0s+300ms", Fault("freeze", "p1", for_ns=300 * MS)),
        ("drop:p0-d3@10s+5s=0.1", Fault("drop", "p0", "d3", 10 * S, 5 * S, 0.1)),
        ("drop:*@10s", Fault("drop", "*", at_ns=10 * S, value=1.0)),
        ("delay:*-d0@1s=200ms", Fault("delay", "*", "d0", S, value=200 * MS)),
        ("slow:p1@1s=0.25", Fault("slow", "p1", at_ns=S, value=0.25)),
    ],
)
def test_faults_are_read_and_shown_as_they_are_written(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault
    assert parse_fault(show_fault(fault)) == fault


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "give KIND:NODE@TIME"),
        ("kill p0", "give KIND:NODE@TIME"),
        ("explode:p0@1s", "'explode' is no fault; give kill, freeze"),
        ("kill:*@1s", "name one node"),
        ("kill:p0-d0@1s", "concerns one node, not a link"),
        ("cut:p0@1s+2s", "happens once"),
        ("freeze:p0@1s", "say how long: freeze:p0@1s+3s"),
        ("kill:p0@soon", "duration"),
        ("kill:p0@-1s", "duration"),
        ("kill:p0@1s=3", "takes no value"),
        ("drop:p0@1s=2", "2 is no chance: give a number above 0, at most 1"),
        ("slow:p0@1s", "say how much"),
        ("delay:p0@1s=fast", "duration"),
        ("slow:p0@1s=nan", "nan is no part"),
    ],
)
def test_a_wrong_fault_is_told_what_would_be_right(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="--fault") as refused:
        parse_fault(text)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kill:p2@1s", "'kill:p2@1s': there is no p2; the prefill nodes: p0 to p1"),
        ("drop:p0-d9@1s=0.5", "'drop:p0-d9@1s=0.5': there is no d9; the decode nodes: d0 alone"),
    ],
)
def test_a_fault_of_no_node_names_those_that_there_are(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="--fault") as refused:
        plan_of(Options(prefill=2, faults=(parse_fault(text),)), PROFILE, Workload("w", ()))
    assert problem in str(refused.value)


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        (Options(prefill=0), "--prefill"),
        (Options(decode=-1), "--decode"),
        (Options(prefill_chunk=500), "--prefill-chunk"),
        (Options(max_batch_tokens=10, max_running=20), "--max-running"),
        (Options(block_size=90_000), "--block-size"),
        (Options(prefill=20, decode=2000), "--reach"),
        (Options(lease_ns=5 * S, renew_ns=5 * S), "--lease"),
    ],
)
def test_settings_that_cannot_work_are_named(options: Options, setting: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_of(options, PROFILE, Workload("w", ()))
    assert refused.value.setting == setting


def test_blocks_are_the_workload_s_unless_asked_for() -> None:
    known, unknown = Workload("w", (), 64), Workload("w", ())
    assert plan_of(Options(), PROFILE, known).block_size == 64
    assert plan_of(Options(), PROFILE, unknown).block_size == 512
    assert plan_of(Options(block_size=16), PROFILE, known).block_size == 16


# ---------------------------------------------------------------- names of blocks


def test_equal_ids_after_another_beginning_are_another_block() -> None:
    """A block is named by all that comes before it, whether or not the workload's ids are."""
    hashes = Hashes(100, 100)
    one, two = hashes.of(Asked(0, 300, 1, (1, 7, 8)), 0), hashes.of(Asked(0, 300, 1, (2, 7, 8)), 1)
    assert not set(one) & set(two)
    assert hashes.of(Asked(0, 250, 1, (1, 7, 9)), 2) == one[:2]


def test_without_ids_nothing_is_shared() -> None:
    hashes = Hashes(0, 100)
    assert len({*hashes.of(Asked(0, 300, 1), 0), *hashes.of(Asked(0, 300, 1), 1)}) == 6
