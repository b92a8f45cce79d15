"""/metrics of a prefill and a decode node that have handed over, read with Prometheus' own parser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdbus.nodes.http.node_metrics import ALIASES
from pdbus.nodes.node_process import NodeProcess

from .faults import prompt
from .lone_nodes import Lone, lone_nodes

pytestmark = pytest.mark.live

REQUESTS, TOKENS, PROMPT = 3, 4, 70


@pytest.fixture(scope="module")
def pair() -> Iterator[Lone]:
    with lone_nodes() as lone:
        p = lone.start("prefill", "p")
        d = lone.start("decode", "d", join=p.address)
        lone.ready(p, d)
        lone.until_peer(d, name="p", state="up", detail="")
        for salt in range(REQUESTS):
            answered = lone.answer(d, prompt(PROMPT, salt), max_tokens=TOKENS)
            assert answered.finished.timeline.remote
        lone.check_clean()
        yield lone


def scraped(lone: Lone, node: NodeProcess) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(lone.web.get(f"{node.http}/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_a_decode_node_tells_what_it_has_read_and_from_whom(pair: Lone) -> None:
    said = scraped(pair, pair.nodes[1])
    ((labels, read),) = said["pdbus_read_bytes_sum"]
    assert labels == {"peer": "p"} and read > 0 and read % REQUESTS == 0
    ((labels, reads),) = said["pdbus_reads_total"]
    assert labels == {"peer": "p", "outcome": "done"} and reads >= REQUESTS
    for name in ("posts_total", "runs_sum", "seconds_sum", "post_seconds_sum", "goodput_bytes_per_second"):
        assert said[f"pdbus_read_{name}"][0][1] > 0, name
    assert said["pdbus_confirms_total"] == [({"answer": "valid"}, REQUESTS)]
    assert said["pdbus_peer_circuit"] == [({"peer": "p"}, 0)]
    assert said["pdbus_requests_ended_total"] == [({"reason": "length"}, REQUESTS)]
    assert said["pdbus_prompt_tokens_total"] == [({}, REQUESTS * PROMPT)]
    assert said["pdbus_request_first_token_seconds_count"] == [({}, REQUESTS)]
    assert said["pdbus_metrics_mistakes_total"] == [({}, 0)]


def test_a_prefill_node_tells_how_its_leases_ended(pair: Lone) -> None:
    said = scraped(pair, pair.nodes[0])
    assert said["pdbus_leases_ended_total"] == [({"cause": "done"}, REQUESTS)]
    assert said["pdbus_lease_seconds_count"] == [({}, REQUESTS)]
    assert said["pdbus_leases_held"] == [({}, 0)] and said["pdbus_lease_age_max_seconds"] == [({}, 0)]
    assert said["pdbus_tombstones"] == [({}, REQUESTS)]


def test_vllms_names_stand_beside_ours(pair: Lone) -> None:
    said = scraped(pair, pair.nodes[1])
    ours, theirs = said["pdbus_read_bytes_sum"], said["vllm:nixl_bytes_transferred_sum"]
    assert theirs == [({"model_name": "coded", "engine": "0"}, ours[0][1])]
    assert said["vllm:generation_tokens_total"][0][1] == REQUESTS * TOKENS
    assert said["vllm:request_success_total"][0][0]["finished_reason"] == "length"
    names = {name.removeprefix("vllm:").removesuffix("_total").removesuffix("_count") for name in said}
    assert ALIASES.keys() <= names
