"""The clock and queue that simulations run on."""

from __future__ import annotations

from pdbus.nodes.replay.driver import Driver, Shell
from pdbus.nodes.replay.simulate.fabric import Fabric

from tests.simulated import many, play


def test_what_is_due_together_happens_in_the_order_in_which_it_was_said() -> None:
    driver, happened = Driver(), []
    for name, at in (("late", 5), ("first", 3), ("second", 3)):
        driver.at(at, happened.append, name)
    driver.at(3, lambda: driver.after(0, happened.append, "third"))
    driver.run(4)
    assert happened == ["first", "second", "third"] and driver.now == 4
    driver.run(100, lambda: "late" in happened)
    assert driver.now == 5


def test_a_frozen_process_hears_everything_later_and_in_order() -> None:
    cluster = play(many(1, 1))
    shell: Shell = cluster.nodes["d0"]
    driver, heard = cluster.driver, []
    now = driver.now
    shell.freeze(now + 100)
    for i in range(3):
        driver.after(i, shell.enter, heard.append, i)
    driver.at(now + 100, shell.enter, heard.append, 3)
    driver.run(now + 99)
    assert heard == []
    driver.run(now + 100)
    assert heard == [0, 1, 2, 3]


def test_nothing_reaches_a_process_that_is_over() -> None:
    cluster = play(many(1, 1))
    shell, heard = cluster.nodes["d0"], []
    shell.freeze(cluster.driver.now + 5)
    shell.enter(heard.append, 1)
    shell.end()
    shell.enter(heard.append, 2)
    cluster.driver.run(cluster.driver.now + 10)
    assert heard == []


# ---------------------------------------------------------------- links


class Reads:
    """Ten bytes a ns each way."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.fabric = Fabric(self.driver, 10e9)
        self.ended: dict[str, int] = {}
        self.broken: list[str] = []

    def start(self, name: str, owner: str, reader: str, size: int) -> None:
        def done() -> None:
            self.ended[name] = self.driver.now

        self.fabric.start(owner, reader, size, done, lambda: self.broken.append(name))


def test_reads_share_a_link_equally_and_go_on_faster_when_one_ends() -> None:
    reads = Reads()
    reads.start("a", "p", "d", 1000)
    reads.start("b", "p", "e", 3000)
    reads.driver.run(10_000)
    assert reads.ended["a"] in (200, 201)  # half of p's link
    assert abs(reads.ended["b"] - 400) <= 2  # 1000 bytes by then, the other 2000 alone


def test_a_read_is_as_fast_as_the_slower_of_its_two_shares() -> None:
    reads = Reads()
    for reader in ("d", "e"):
        reads.start(reader, "p", reader, 1000)
    reads.start("other", "q", "d", 1000)
    reads.driver.run(10_000)
    assert all(abs(at - 200) <= 2 for at in reads.ended.values())


def test_a_slowed_link_slows_what_is_under_way() -> None:
    reads = Reads()
    reads.start("a", "p", "d", 1000)
    reads.driver.at(50, reads.fabric.slow, "p", 0.1)
    reads.driver.at(150, reads.fabric.slow, "p", 1.0)
    reads.driver.run(10_000)
    assert abs(reads.ended["a"] - (50 + 100 + 40)) <= 3


def test_reads_from_an_owner_that_has_gone_break_and_those_to_it_do_not() -> None:
    reads = Reads()
    reads.start("from it", "p", "d", 1000)
    reads.start("to it", "d", "p", 1000)
    reads.driver.at(50, reads.fabric.owner_gone, "p")
    reads.driver.run(10_000)
    assert reads.broken == ["from it"] and list(reads.ended) == ["to it"]
