"""Any cluster, any load: what each routing policy promises."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pdbus.bus.wire import replace
from pdbus.nodes.gateway.routing import BUSY, POLICIES, Ask, NodeView, choose

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
    """Whether it was one of several best before."""
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
    assert choose(policy, ask, now).node == before or _tied(policy, ask, now, before)


def _tied(policy: str, ask: Ask, nodes: list[NodeView], name: str) -> bool:
    return _equal(policy, ask, nodes, name)


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
