"""The model itself: what memory may do, what counts as a violation, how tasks take turns. No
kernels here."""

from __future__ import annotations

import ctypes

import pytest

torch = pytest.importorskip("torch")

from tileweave.explore.memory import Memory, Region, Store, Violation, Writer  # noqa: E402
from tileweave.explore.ranks import World  # noqa: E402
from tileweave.explore.strategies import Delays, Priorities, Walk, Written  # noqa: E402
from tileweave.explore.tasks import Decision, Task  # noqa: E402
from tileweave.transport.interface import Copy  # noqa: E402


class Cells:
    """A memory with a few shared words, and writers that store to them."""

    def __init__(self, writers: int = 3, words: int = 8) -> None:
        self.memory = Memory(writers)
        self.buffer = torch.zeros(words, dtype=torch.int32)
        self.start = self.buffer.data_ptr()
        self.region = self.memory.add(
            Region("words", self.start, self.start + 4 * words, shared=True)
        )
        self.memory.names = [f"writer {i}" for i in range(writers)]
        self.writers = [self._writer(i, writers) for i in range(writers)]

    def _writer(self, i: int, writers: int) -> Writer:
        import numpy as np

        clock = np.zeros(writers, np.int32)
        clock[i] = 1
        return Writer(f"writer {i}", i, clock)

    def address(self, word: int) -> int:
        return self.start + 4 * word

    def store(self, writer: int, word: int, value: int) -> None:
        place = ctypes.c_int32.from_address(self.address(word))
        self.memory.check_write(self.writers[writer], self.region, slice(word, word + 1))
        apply = lambda: setattr(place, "value", value)  # noqa: E731
        self.memory.put(
            self.writers[writer], Store(self.address(word), self.address(word) + 4, apply)
        )

    def load(self, writer: int, word: int) -> int:
        self.memory.check_read(self.writers[writer], self.region, slice(word, word + 1))
        return self.memory.read_word(self.writers[writer], self.address(word))

    def release(self, writer: int, word: int, value: int, ordered: bool = True) -> None:
        self.memory.release(self.writers[writer], self.address(word), value, ordered)

    def arrive(self, writer: int, at: int) -> None:
        self.memory.arrive(self.writers[writer], at)


def test_stores_are_late_and_out_of_order() -> None:
    cells = Cells()
    cells.store(0, 0, 10)
    cells.store(0, 1, 11)
    assert cells.buffer.tolist()[:2] == [0, 0], "nothing has arrived"
    assert cells.writers[0].eligible() == [0, 1], "either may come first"
    cells.arrive(0, 1)
    assert cells.buffer.tolist()[:2] == [0, 11]


def test_stores_to_one_address_keep_their_order() -> None:
    cells = Cells()
    cells.store(0, 0, 10)
    cells.store(0, 0, 11)
    assert cells.writers[0].eligible() == [0]


def test_release_follows_earlier_stores_and_delays_nothing() -> None:
    cells = Cells()
    cells.store(0, 0, 10)
    cells.release(0, 4, 1)
    cells.store(0, 1, 11)
    assert cells.writers[0].eligible() == [0, 2], (
        "the signal waits for the store before it; the store after it does not"
    )
    cells.arrive(0, 0)
    assert cells.writers[0].eligible() == [0, 1]


def test_a_program_sees_its_own_stores() -> None:
    cells = Cells()
    cells.store(0, 0, 10)
    cells.store(0, 1, 11)
    assert cells.load(0, 1) == 11
    assert cells.buffer.tolist()[:2] == [0, 11], "and only what it looks at had to arrive"


def test_acquire_after_release_is_in_order() -> None:
    cells = Cells()
    cells.store(0, 0, 10)
    cells.release(0, 4, 1)
    cells.memory.drain(cells.writers[0])
    assert cells.memory.acquire(cells.writers[1], cells.address(4)) == 1
    assert cells.load(1, 0) == 10


def test_order_is_transitive() -> None:
    cells = Cells()
    cells.store(0, 0, 10)
    cells.release(0, 4, 1)
    cells.memory.drain(cells.writers[0])
    cells.memory.acquire(cells.writers[1], cells.address(4))
    cells.release(1, 5, 1)
    cells.memory.drain(cells.writers[1])
    cells.memory.acquire(cells.writers[2], cells.address(5))
    assert cells.load(2, 0) == 10


def wrong_read_without_acquire(cells: Cells) -> None:
    cells.store(0, 0, 10)
    cells.release(0, 4, 1)
    cells.memory.drain(cells.writers[0])
    cells.load(1, 0)  # the value is there, but no order guarantees it


def wrong_read_after_a_plain_signal(cells: Cells) -> None:
    cells.store(0, 0, 10)
    cells.release(0, 4, 1, ordered=False)
    cells.memory.drain(cells.writers[0])
    cells.memory.acquire(cells.writers[1], cells.address(4))
    cells.load(1, 0)


def wrong_read_of_what_was_stored_after_the_signal(cells: Cells) -> None:
    cells.release(0, 4, 1)
    cells.store(0, 0, 10)
    cells.memory.drain(cells.writers[0])
    cells.memory.acquire(cells.writers[1], cells.address(4))
    cells.load(1, 0)


def wrong_read_of_nothing(cells: Cells) -> None:
    cells.load(1, 0)


def wrong_store_during_a_read(cells: Cells) -> None:
    cells.store(0, 0, 10)
    cells.release(0, 4, 1)
    cells.memory.drain(cells.writers[0])
    cells.memory.acquire(cells.writers[1], cells.address(4))
    cells.load(1, 0)
    cells.store(0, 0, 20)


def wrong_concurrent_store(cells: Cells) -> None:
    cells.store(0, 0, 10)
    cells.store(1, 0, 20)


def wrong_block_during_a_read(cells: Cells) -> None:
    import numpy as np

    cells.store(0, 5, 10)
    cells.release(0, 4, 1)
    cells.memory.drain(cells.writers[0])
    cells.memory.acquire(cells.writers[1], cells.address(4))
    cells.load(1, 5)
    block = np.array([[0, 1, 2], [3, 5, 6]])
    cells.memory.check_write(cells.writers[0], cells.region, block)


def wrong_place(cells: Cells) -> None:
    cells.memory.region(cells.address(7), cells.address(9), "writer 0")


WRONG = {
    wrong_read_without_acquire: (
        "early read: writer 1 reads words.0:1., which nothing orders after the store by writer 0"
    ),
    wrong_read_after_a_plain_signal: "early read: .* by writer 0",
    wrong_read_of_what_was_stored_after_the_signal: "early read",
    wrong_read_of_nothing: "early read: .* was not written by any task",
    wrong_store_during_a_read: (
        "overwrite: writer 0 writes words.0:1., .* after the read by writer 1"
    ),
    wrong_block_during_a_read: (
        "overwrite: writer 0 writes words.5:6., .* after the read by writer 1"
    ),
    wrong_concurrent_store: "overwrite: writer 1 writes .* after the store by writer 0",
    wrong_place: "wild access",
}


@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
def test_violations_are_found(program) -> None:
    with pytest.raises(Violation, match=WRONG[program]):
        program(Cells())


def test_acknowledged_stores_may_be_overwritten() -> None:
    """Protocols rely on this: the reader's own signal says that it has read."""
    cells = Cells()
    cells.store(0, 0, 10)
    cells.release(0, 4, 1)
    cells.memory.drain(cells.writers[0])
    cells.memory.acquire(cells.writers[1], cells.address(4))
    cells.load(1, 0)
    cells.release(1, 5, 1)
    cells.memory.drain(cells.writers[1])
    cells.memory.acquire(cells.writers[0], cells.address(5))
    cells.store(0, 0, 20)


# --- Tasks ---

STRATEGIES = [Walk(1), Walk(2), Priorities(3), Delays(frozenset({3, 5}), eager=False), Written({})]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
def test_deadlock_is_detected(strategy) -> None:
    world = World(2, 1, strategy)
    word = torch.zeros(2, dtype=torch.int32)

    def body(rank: int) -> None:
        if rank == 0:
            world.tasks.park((word.data_ptr(), word.data_ptr() + 4))  # no task ever stores there

    with pytest.raises(Violation, match="deadlock: rank 0 host waits"):
        world.run(body)
    world.close()


def test_barrier_holds_every_task() -> None:
    for seed in range(20):
        world, inside = World(3, 1, Walk(seed)), []

        def body(rank: int, world: World = world, inside: list[int] = inside) -> None:
            for round_ in range(3):
                inside.append(round_)
                world.tasks.point()
                world.barrier()

        world.run(body)
        world.close()
        assert inside == sorted(inside), (
            "no task begins a round before all have ended the one before"
        )


def test_a_failure_ends_every_task() -> None:
    world, ended, word = World(2, 1, Walk(0)), [], torch.zeros(1, dtype=torch.int32)

    def body(rank: int) -> None:
        world.barrier()
        try:
            if rank == 0:
                world.tasks.point()
                raise world.tasks.fail("wrong result", "as planned")
            world.tasks.park((word.data_ptr(), word.data_ptr() + 4))
        finally:
            ended.append(rank)

    with pytest.raises(Violation, match="as planned"):
        world.run(body)
    world.close()
    assert sorted(ended) == [0, 1]


@pytest.mark.parametrize("seed", range(4))
def test_second_queue_is_in_order_and_waits_for_no_copy_of_the_first(seed: int) -> None:
    world = World(2, 1, Walk(seed))
    words = torch.tensor([0, 1, 1, 2, 2, 0, 0, 0, 0], dtype=torch.int32)
    at = [words.data_ptr() + 4 * i for i in range(len(words))]
    seen = []

    def body(rank: int) -> None:
        if rank == 1:
            return
        world.know(rank, "words", words)
        me = world.ranks[rank]
        world.push(me, [Copy(at[7], at[1], 8, counter=at[0], count=1)], 0)
        for source in (1, 3):
            world.push_second(me, [Copy(at[5], at[source], 8)], 0)
        world.join(me, 1)
        seen.append(words[5:].tolist())
        world.memory.release(me.host, at[0], 1)
        world.join(me)
        seen.append(words[5:].tolist())

    world.run(body)
    world.close()
    assert seen == [[2, 2, 0, 0], [2, 2, 1, 1]]


@pytest.mark.parametrize("joined", [True, False])
def test_second_queue_knows_only_what_was_done_before_its_push(joined: bool) -> None:
    """A store of the host after a push races with the copy, unless it comes after a join."""
    world = World(2, 1, Walk(0))
    words = torch.zeros(8, dtype=torch.int32)
    at = words.data_ptr()

    def body(rank: int) -> None:
        if rank == 1:
            return
        world.know(rank, "words", words)
        me = world.ranks[rank]
        for place in (at, at + 16):
            world.push_second(me, [Copy(place, place + 8, 8)], 0)
        if joined:
            world.join(me, 1)
        world.wrote(rank, words[4:])  # what the second push copies

    try:
        if joined:
            world.run(body)
        else:
            with pytest.raises(Violation, match="second queue"):
                world.run(body)
    finally:
        world.close()


def test_schedules_repeat() -> None:
    def decisions(seed: int) -> list[Decision]:
        world = World(3, 1, Walk(seed))
        world.run(lambda rank: [world.tasks.point() for _ in range(10)] and None)
        world.close()
        return world.tasks.decisions

    assert decisions(4) == decisions(4)
    assert decisions(4) != decisions(5)


def test_tasks_have_names() -> None:
    world = World(2, 1, Walk(0))
    assert isinstance(world.ranks[1].host, Task)
    assert world.memory.names[world.ranks[1].engines[0].component] == "rank 1 copies"
    world.close()
