"""What a node measures, and how it reads under /metrics: with Prometheus' own parser."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdbus.bus.messages import LeaseId, LeaseReleased, PrefillFailed, Timeline, TryId
from pdbus.bus.wire import Header
from pdbus.connector.ipc import ReadEnded
from pdbus.nodes import events as ev
from pdbus.nodes.http.app import create_app
from pdbus.nodes.http.metrics import HttpMetrics
from pdbus.nodes.measures import OTHER, PEERS_MAX, Measures

from tests.fake_client import STATUS, FakeClient

MS = 1_000_000
TRY = TryId(node="d", incarnation=b"d", request=b"r", attempt=1)
LEASE = LeaseId(node="p", incarnation=b"p", epoch=1, generation=1)
Labels = frozenset[tuple[str, str]]


def samples(measures: Measures, **status: Any) -> dict[tuple[str, Labels], float]:
    """As somebody who scrapes them reads them."""
    text = HttpMetrics().text({"model": "tiny", "measured": measures.families(), **status}).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(**labels: str) -> Labels:
    return frozenset(labels.items())


VLLM = of(model_name="tiny", engine="0")


def read(measures: Measures, number: int, peer: str = "p", **ended: Any) -> None:
    start = ev.StartRead(read=number, peer=f"{peer}/01/1", begin=0, end=1, source=(0,), target=(0,))
    measures.turn(ev.Tick(), [start])
    measures.read_ended(ReadEnded(read=number, **ended))


def test_reads_of_every_peer_and_of_all_for_vllm() -> None:
    measures = Measures()
    done = {"posts": 2, "runs": 30, "post_ns": 1 * MS}
    read(measures, 1, "p", bytes=1 << 20, transfer_ns=2 * MS, **done)
    read(measures, 2, "p", bytes=3 << 20, transfer_ns=6 * MS, **done)
    read(measures, 3, "q", bytes=1 << 10, transfer_ns=1 * MS, **done)
    read(measures, 4, "q", problem="the peer has gone", posts=1)
    said = samples(measures)
    p = of(peer="p")
    assert said["pdbus_read_bytes_sum", p] == 4 << 20
    assert said["pdbus_read_runs_sum", p] == 60
    assert said["pdbus_read_posts_total", p] == 4
    assert said["pdbus_read_seconds_count", p] == 2 and said["pdbus_read_post_seconds_count", p] == 2
    assert said["pdbus_read_goodput_bytes_per_second", p] == pytest.approx((4 << 20) / 0.008)
    assert said["pdbus_reads_total", of(peer="q", outcome="failed")] == 1
    assert said["vllm:nixl_bytes_transferred_sum", VLLM] == (4 << 20) + (1 << 10)
    assert said["vllm:nixl_xfer_time_seconds_count", VLLM] == 3
    assert said["vllm:nixl_xfer_time_seconds_bucket", VLLM | of(le="0.0025")] == 2
    assert said["vllm:nixl_num_failed_transfers_total", VLLM] == 1
    assert said["vllm:nixl_num_kv_expired_reqs_total", VLLM] == 0


def test_a_read_that_is_known_to_nobody_is_not_measured() -> None:
    """Its mover was lost, and another begins to count anew."""
    measures = Measures()
    measures.turn(ev.MoverLost(problem="killed", asked=False), [])
    measures.read_ended(ReadEnded(read=1, bytes=1))
    assert not [name for name, _ in samples(measures) if name.startswith("pdbus_reads_total")]


def test_leases_claims_and_refusals_by_cause() -> None:
    measures = Measures()
    for cause in ("done", "expired", "expired"):
        data: dict[str, object] = {"cause": cause, "held_ns": 20 * MS}
        measures.turn(ev.Tick(), [ev.Publish(topic="lease", event="lease.ended", data=data)])
    for cause in ("no_room", "invalid: have 7: must be within the prompt", "a cause of another version"):
        failed = PrefillFailed(try_=TRY, cause=cause)
        measures.turn(ev.Tick(), [ev.Send(link="l", to="d", to_inc=b"d", message=failed)])
    for valid, cause in ((True, "done"), (False, "expired")):
        released = LeaseReleased(try_=TRY, lease=LEASE, valid=valid, cause=cause)
        measures.turn(ev.MessageCame(link="l", header=Header(from_="p", from_inc=b"p"), message=released), [])
    said = samples(measures)
    assert said["pdbus_leases_ended_total", of(cause="expired")] == 2 and said["pdbus_lease_seconds_count", of()] == 3
    assert said["vllm:nixl_num_kv_expired_reqs_total", VLLM] == 2
    assert [said["pdbus_prefill_refused_total", of(cause=c)] for c in ("no_room", "invalid", OTHER)] == [1, 1, 1]
    assert [said["pdbus_confirms_total", of(answer=a)] for a in ("valid", "expired")] == [1, 1]


def ended(reason: str, timeline: Timeline) -> ev.EndRequest:
    return ev.EndRequest(
        request=b"r", seq=1, reason=reason, prompt_tokens=10, cached_tokens=4, completion_tokens=3, timeline=timeline
    )


def test_requests_and_what_their_timelines_say() -> None:
    measures = Measures()
    whole = Timeline(remote=True, queue_ns=MS, prefill_ns=MS, ttft_ns=2 * MS, confirm_ns=MS, handover_ns=MS, total_ns=9)
    measures.turn(ev.Tick(), [ended("length", whole), ended("cancelled", Timeline(total_ns=5))])
    said = samples(measures)
    assert said["pdbus_requests_ended_total", of(reason="length")] == 1
    assert said["vllm:request_success_total", VLLM | of(finished_reason="abort")] == 1
    assert said["pdbus_request_seconds_count", of()] == 2
    assert said["vllm:time_to_first_token_seconds_count", VLLM] == 1, "one was cancelled before"
    assert said["vllm:time_to_first_token_seconds_sum", VLLM] == pytest.approx(0.002)
    assert (said["vllm:prompt_tokens_total", VLLM], said["vllm:prefix_cache_hits_total", VLLM]) == (20, 8)


def test_gauges_under_vllms_names() -> None:
    numbers = {"kv_blocks": 8, "kv_blocks_free": 2, "kv_blocks_cached": 2, "requests_running": 3, "requests_waiting": 1,
               "requests_fetching": 2, "requests_preempted_total": 5}  # fmt: skip
    said = samples(Measures(), metrics=numbers)
    assert said["vllm:kv_cache_usage_perc", VLLM] == 0.5
    assert said["vllm:num_requests_running", VLLM] == 3 and said["vllm:num_requests_waiting", VLLM] == 3
    assert said["vllm:num_preemptions_total", VLLM] == 5


def test_series_of_peers_are_bounded() -> None:
    """Nodes without a name of their own have another at every start."""
    measures = Measures()
    for number in range(PEERS_MAX + 10):
        read(measures, number, f"p{number}", bytes=1, transfer_ns=1)
    peers = {dict(labels).get("peer") for _, labels in samples(measures)} - {None}
    assert peers == {f"p{number}" for number in range(10, PEERS_MAX + 10)}


def test_a_mistake_in_here_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It is counted, and said once."""
    measures = Measures()
    broken = ev.Publish(topic="lease", event="lease.ended", data={})
    with caplog.at_level(logging.ERROR):
        measures.turn(ev.Tick(), [broken])
        measures.turn(ev.Tick(), [broken])
    assert len(caplog.records) == 1
    assert samples(measures)["pdbus_metrics_mistakes_total", of()] == 2


@pytest.mark.parametrize(
    "status",
    [
        {"metrics": {"a": "many", "kv_blocks": 1}},
        {"measured": [["pdbus_x", "counter"], 5, ["pdbus_y", "no such kind", "", []], ["pdbus_z", "gauge", "", [[1]]]]},
        {"measured": [["pdbus_w", "gauge", "", [["", {}, "much"]]]], "metrics": None},
    ],
)
def test_what_another_version_says_is_left_out(status: dict[str, Any]) -> None:
    """A scrape must not fail for it."""
    client = FakeClient()
    client.says = {**STATUS, **status}

    async def scrape() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(client))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as web:
            return await web.get("/metrics")

    response = asyncio.run(scrape())
    assert response.status_code == 200
    names = [family.name for family in text_string_to_metric_families(response.text)]
    assert "pdbus_node_up" in names and not {"pdbus_a", "pdbus_y", "pdbus_z", "pdbus_w"} & set(names)
