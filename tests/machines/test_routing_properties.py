"""Any cluster, any load: what each routing policy promises."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from pdbus.bus.wire import replace
from pdbus.nodes.gateway.routing import ALIKE, BUSY, POLICIES, Ask, NodeView, Rates, choose, prompt_rates

counts = st.integers(0, 50)


@st.composite
def views(draw: st.DrawFn) -> list[NodeView]:
    names = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True))
    return [
        NodeView(
            name=name,
            running=draw(counts),
            queued=draw(st.integers(0, 5)),
            queued_tokens=draw(st.integers(0, 5000)),
            free_blocks=draw(counts),
            matched_tokens=16 * draw(st.integers(0, 20)),
            prefill_tokens_per_s=draw(st.integers(0, 3) | st.integers(0, 10**6)),
            read_tokens_per_s=draw(st.integers(0, 3) | st.integers(0, 10**6)),
        )
        for name in names
    ]


asks = st.builds(Ask, turn=st.integers(0, 1000), prompt_tokens=st.integers(1, 2000))
policies = st.sampled_from(sorted(POLICIES))


@given(policies, asks, views())
def test_one_of_the_best_is_chosen_and_every_node_has_a_score(policy: str, ask: Ask, nodes: list[NodeView]) -> None:
    choice = choose(policy, ask, nodes)
    best = {node.name for node, score in zip(nodes, choice.scores, strict=True) if score == max(choice.scores)}
    assert choice.node in best


@given(policies, asks, views(), st.randoms(use_true_random=False))
def test_the_order_of_the_nodes_does_not_matter(policy: str, ask: Ask, nodes: list[NodeView], random: object) -> None:
    """Gateways side by side learn of nodes in another order."""
    shuffled = list(nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose(policy, ask, shuffled).node == choose(policy, ask, nodes).node


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True), st.integers(0, 100))
def test_equal_nodes_take_turns(policy: str, names: list[str], turn: int) -> None:
    nodes = [NodeView(name=name, free_blocks=50) for name in names]
    chosen = [choose(policy, Ask(turn=turn + i, prompt_tokens=10), nodes).node for i in range(len(nodes))]
    assert sorted(chosen) == sorted(names)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"round-robin"}))
@given(asks, views(), st.data())
def test_more_load_never_makes_a_node_the_choice(
    policy: str, ask: Ask, nodes: list[NodeView], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(nodes) - 1))
    before = choose(policy, ask, nodes).node
    loaded = replace(nodes[place], running=nodes[place].running + data.draw(st.integers(1, 20)))
    after = choose(policy, ask, [*nodes[:place], loaded, *nodes[place + 1 :]])
    if policy != "prefix":  # there the mean moves too, below which nodes count as free
        assert after.node != loaded.name or before == loaded.name or _equal(policy, ask, nodes, loaded.name)


def _equal(policy: str, ask: Ask, nodes: list[NodeView], name: str) -> bool:
    """Whether it is one of several best."""
    scores = choose(policy, ask, nodes).scores
    return any(node.name == name and score == max(scores) for node, score in zip(nodes, scores, strict=True))


@pytest.mark.parametrize("policy", ["prefix", "cost"])
@given(asks, views(), st.data())
def test_a_longer_prefix_never_loses_a_node_the_choice(
    policy: str, ask: Ask, nodes: list[NodeView], data: st.DataObject
) -> None:
    before = choose(policy, ask, nodes).node
    more = data.draw(st.integers(1, 500))
    now = [replace(n, matched_tokens=n.matched_tokens + more) if n.name == before else n for n in nodes]
    assert choose(policy, ask, now).node == before or _equal(policy, ask, now, before)


@given(asks, views())
def test_prefix_takes_the_longest_among_those_that_are_not_busy(ask: Ask, nodes: list[NodeView]) -> None:
    most = BUSY * sum(n.running for n in nodes) / len(nodes) + 1
    chosen = next(n for n in nodes if n.name == choose("prefix", ask, nodes).node)
    assert chosen.running <= most
    assert chosen.matched_tokens == max(n.matched_tokens for n in nodes if n.running <= most)


@given(asks)
def test_cost_leaves_a_warm_node_only_when_it_is_busier_than_the_prefix_is_worth(ask: Ask) -> None:
    prompt = max(256, ask.prompt_tokens)
    warm = NodeView(name="warm", matched_tokens=192, free_blocks=200)
    cold = NodeView(name="cold", free_blocks=200)
    chosen = [
        choose("cost", Ask(turn=0, prompt_tokens=prompt), [replace(warm, running=running), cold]).node
        for running in range(40)
    ]
    assert chosen[0] == "warm" and chosen[-1] == "cold"
    assert chosen == sorted(chosen, reverse=True), "once left, it stays left"


@given(asks, views(), st.data())
def test_cost_never_leaves_a_node_because_it_is_faster(ask: Ask, nodes: list[NodeView], data: st.DataObject) -> None:
    before = choose("cost", ask, nodes).node
    place = next(i for i, node in enumerate(nodes) if node.name == before)
    prefill, read = nodes[place].prefill_tokens_per_s, nodes[place].read_tokens_per_s
    assume(Rates(prefill, read).speed)  # what is not known counts as fast: to learn it is not to become faster
    faster = replace(
        nodes[place],
        prefill_tokens_per_s=prefill + data.draw(st.integers(0, 10**6)),
        read_tokens_per_s=read + data.draw(st.integers(0, 10**6)) if read else 0,
    )
    now = [*nodes[:place], faster, *nodes[place + 1 :]]
    assert choose("cost", ask, now).node == before or _equal("cost", ask, now, before)


@given(st.integers(1, 10**6), st.integers(0, 100))
def test_cost_takes_turns_among_speeds_that_are_alike(rate: int, turn: int) -> None:
    """Two measurements of equal machines differ, and one of them would get everything."""
    nodes = [NodeView(name="a", free_blocks=50, prefill_tokens_per_s=rate),
             NodeView(name="b", free_blocks=50, prefill_tokens_per_s=int(rate * ALIKE)),
             NodeView(name="c", free_blocks=50)]  # fmt: skip
    chosen = [choose("cost", Ask(turn=turn + i, prompt_tokens=10), nodes).node for i in range(3)]
    assert sorted(chosen) == ["a", "b", "c"]


def test_cost_prefers_the_faster_node_until_it_is_so_much_busier() -> None:
    slow = NodeView(name="slow", free_blocks=500, prefill_tokens_per_s=1000)
    fast = NodeView(name="fast", free_blocks=500, prefill_tokens_per_s=4000)
    ask = Ask(turn=0, prompt_tokens=1000)
    assert choose("cost", ask, [slow, fast]).node == "fast"
    assert choose("cost", ask, [slow, replace(fast, queued_tokens=2500)]).node == "fast"
    assert choose("cost", ask, [slow, replace(fast, queued_tokens=3500)]).node == "slow"
    assert choose("cost", ask, [replace(slow, matched_tokens=900), fast]).node == "slow"


def test_cost_prefers_the_faster_link_where_it_is_what_takes_longer() -> None:
    """Reads go on beside the computing: a link that keeps up with it changes nothing."""
    far = NodeView(name="far", free_blocks=500, prefill_tokens_per_s=4000, read_tokens_per_s=1000)
    near = NodeView(name="near", free_blocks=500, prefill_tokens_per_s=4000, read_tokens_per_s=100_000)
    ask = Ask(turn=0, prompt_tokens=1000)
    assert [choose("cost", replace(ask, turn=turn), [far, near]).node for turn in range(2)] == ["near", "near"]
    assert choose("cost", ask, [far, replace(near, queued_tokens=3500)]).node == "far"
    keeps_up = replace(far, read_tokens_per_s=4000)
    assert len({choose("cost", replace(ask, turn=turn), [keeps_up, near]).node for turn in range(2)}) == 2


PEER = {"state": "up", "role": "prefill", "prefill_tokens_per_s": 900}


@pytest.mark.parametrize(
    ("status", "rate"),
    [
        ({}, 0),
        ({"peers": [{**PEER, "prefill_tokens_per_s": 700}, PEER]}, 900),
        ({"peers": [PEER], "metrics": {"prefill_tokens_per_s": 5000}}, 900),
        ({"peers": [PEER], "metrics": {"prefill_tokens_per_s": 5000}, "prefill_policy": "auto"}, 5000),
        ({"peers": [PEER], "metrics": {"prefill_tokens_per_s": 50}, "prefill_policy": "local"}, 50),
        ({"peers": [{**PEER, "state": "dead"}], "metrics": {"prefill_tokens_per_s": 50}}, 50),
        ({"peers": [{**PEER, "draining": True}]}, 0),
        ({"peers": [{**PEER, "circuit": "open"}]}, 0),
        ({"peers": [{**PEER, "role": "decode"}]}, 0),
        ({"peers": [{"state": "up", "role": "prefill"}], "metrics": {"prefill_tokens_per_s": 50}}, 0),
    ],
    ids=["nothing", "the fastest", "remote", "auto", "local", "dead", "drains", "circuit", "no prefill", "older peer"],
)
def test_a_decode_node_is_as_fast_as_where_its_prompts_are_computed(status: dict[str, object], rate: int) -> None:
    assert prompt_rates(status).prefill == rate


def test_a_link_counts_in_tokens_of_the_decode_nodes_own_kv_cache() -> None:
    slow = {**PEER, "read_bytes_per_s": 50_000}
    fast = {**PEER, "prefill_tokens_per_s": 700, "read_bytes_per_s": 10**9}
    status = {"block_size": 16, "block_bytes": 1600, "peers": [slow]}
    assert prompt_rates(status) == Rates(prefill=900, read=500)
    assert prompt_rates({**status, "peers": [slow, fast]}) == Rates(prefill=700, read=10**7), "the better pair"
    assert prompt_rates({**status, "block_bytes": 0}) == Rates(prefill=900), "an older node does not say"
    assert Rates(prefill=0, read=500).speed == 0, "not known: it counts as fast, and is tried"
