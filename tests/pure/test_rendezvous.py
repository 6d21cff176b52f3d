"""Meetings to map symmetric memory: ranks with different histories agree, and no rank waits
forever.

Nothing can be mapped without GPUs, so a fake does what torch's C++ sends through the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

import tileweave as tw
from tileweave.transport import group_store, rendezvous
from tileweave.transport.group_store import Conversation
from tileweave.transport.rendezvous import Meeting, Messages, Texts, meet
from tileweave.transport.torch_collectives import agree


class Exchange:
    """What torch does in a rendezvous: messages with a number that counts all that this process
    ever sent."""

    def __init__(self, sent_before: int, one_by_one: bool = False) -> None:
        self.number, self.one_by_one = sent_before, one_by_one  # torch 2.11 gets them one by one

    def all_gather(self, store: dist.Store, rank: int, size: int, value: bytes) -> list[bytes]:
        keys = [f"CUDASymmetricMemory/{self.number}/{r}" for r in range(size)]
        self.number += 1
        store.set(keys[rank], value)
        if not self.one_by_one:
            return store.multi_get(keys)
        for key in keys:
            store.wait([key])
        return [store.get(key) for key in keys]

    def barrier(self, store: dist.Store, rank: int, size: int) -> None:
        if self.one_by_one:
            self.all_gather(store, rank, size, b"0")
            return
        store.barrier(f"CUDASymmetricMemory/{self.number}", size)
        self.number += 1

    def rendezvous(self, store: dist.Store, rank: int, size: int, value: bytes) -> list[bytes]:
        found = self.all_gather(store, rank, size, value)
        self.barrier(store, rank, size)
        return found + self.all_gather(store, rank, size, value + b"!")


@dataclass(eq=False)
class Rank:
    """A group, as far as meetings know it: several ranks in one process."""

    store: dist.Store
    rank: int
    size: int
    group_name: str = "three"


@pytest.fixture
def groups_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.size)
    monkeypatch.setattr(group_store, "_get_process_group_store", lambda group: group.store)


def on_ranks(size: int, function: Callable[[int], object]) -> list:
    with ThreadPoolExecutor(size) as pool:
        return [
            job.result(timeout=30) for job in [pool.submit(function, rank) for rank in range(size)]
        ]


@pytest.mark.parametrize("one_by_one", [True, False], ids=["2.11", "2.13"])
@pytest.mark.parametrize("histories", [(0, 0, 0), (7, 0, 3)], ids=["alike", "different"])
def test_ranks_with_different_histories_meet(
    groups_are_ranks: None, histories: tuple[int, ...], one_by_one: bool
) -> None:
    common, size = dist.HashStore(), len(histories)

    def rank(me: int) -> list[list[bytes]]:
        group = Rank(common, me, size)
        messages, seen = Messages(group), []  # type: ignore[arg-type]
        exchange = Exchange(histories[me], one_by_one)
        # calls the methods of the store from C++, as a rendezvous does
        by_torch = dist.PrefixStore("torch", messages)
        for n in range(3):
            messages.start_round(n)
            seen.append(exchange.rendezvous(by_torch, me, size, bytes([n, me, 0, 255])))
            exchange.number += me  # in the meantime this process met others
        return seen

    first, *others = on_ranks(size, rank)
    assert first[2] == [bytes([2, r, 0, 255]) for r in range(size)] + [
        bytes([2, r, 0, 255]) + b"!" for r in range(size)
    ]
    assert all(other == first for other in others)


def test_other_store_keys_pass_through(groups_are_ranks: None) -> None:
    group = Rank(dist.HashStore(), 0, 1)
    messages = Messages(group)  # type: ignore[arg-type]
    messages.start_round(1)
    keys = ["word", "topic/word/3", "topic/5", "topic/6/x"]
    for key in keys:
        messages.set(key, key)
    assert messages.multi_get(keys) == [key.encode() for key in keys]
    assert (
        messages.check(["word"])
        and messages.get("word") == b"word"
        and messages.add("count", 2) == 2
    )
    messages.start_round(2)
    assert not messages.check(["word"]), "a round does not see another's messages"


def test_rendezvous_wait_is_bounded(
    groups_are_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", "0.2")
    group = Rank(dist.HashStore(), 0, 2)
    messages = Messages(group)  # type: ignore[arg-type]
    messages.start_round(1)
    with pytest.raises(tw.PeerTimeout, match=r"waited 0\.2 s for some rank"):
        Exchange(0).all_gather(messages, 0, 2, b"")


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = dist.group.WORLD
    assert found is not None
    yield found
    dist.destroy_process_group()


def test_meeting_is_a_group_known_to_torch(world: dist.ProcessGroup) -> None:
    meetings = [Meeting(world, torch.device("cpu")) for _ in range(2)]
    names = [meeting._name for meeting in meetings]
    assert len(set(names)) == 2
    for meeting in meetings:
        group = _resolve_process_group(meeting._name)
        assert (group.rank(), group.size()) == (0, 1)
        if hasattr(dist.ProcessGroup, "use_pg_for_symm_mem_rendezvous"):
            assert group.use_pg_for_symm_mem_rendezvous == world.use_pg_for_symm_mem_rendezvous
        meeting.close()
        with pytest.raises(RuntimeError):
            _resolve_process_group(meeting._name)
    assert dist.get_world_size(world) == 1


def test_exchange_returns_texts_of_all_ranks(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting(world, torch.device("cpu"))
    texts = ("memory|4096||", "memory|8192|no memory|")
    assert [meeting.exchange(text) for text in texts] == [[text] for text in texts]
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", "0.2")
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    with pytest.raises(
        tw.PeerTimeout, match=r"mapping symmetric memory: rank 0 waited 0\.2 s for rank 1"
    ):
        meeting.exchange("the other rank does not come")
    meeting.close()


# --- Several ranks in one process ---


@pytest.fixture
def three(groups_are_ranks: None, monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", "1")
    store = dist.HashStore()
    return [Rank(store, rank, 3) for rank in range(3)]


def said(function: Callable[..., object], *args: object) -> str:
    try:
        return str(function(*args))
    except tw.TileweaveError as error:
        return f"{type(error).__name__}: {error}"


def test_abandoned_meeting_is_not_taken_for_a_new_one(three: list[Rank]) -> None:
    """Rank 1 gives up twice. Then all arrive, with a new number and new texts."""
    for n in range(2):
        assert "PeerTimeout: a call: rank 1 waited 1 s for rank 0" in said(
            meet, f"old {n}", three[1], "a call"
        )
    found = on_ranks(3, lambda rank: meet(f"new {rank}", three[rank], "a call"))
    assert found == [(3, ["new 0", "new 1", "new 2"])] * 3


def test_store_keeps_only_the_last_texts(three: list[Rank]) -> None:
    for n in range(4):
        on_ranks(3, lambda rank, n=n: meet(f"{n}", three[rank], "a call"))
    assert three[0].store.num_keys() <= 2 * 3 + 3, "counts, and texts of the last meetings"


def test_closed_rank_waits_for_ranks_that_have_not_closed(three: list[Rank]) -> None:
    texts = [Texts(rank) for rank in three]  # type: ignore[arg-type]
    on_ranks(3, lambda rank: texts[rank].barrier())
    texts[1].close()

    def again(rank: int) -> list[str]:
        found = [said(texts[rank].exchange, "memory|")]
        if rank != 1:
            texts[rank].close()
            time.sleep(1.5)  # longer than a rank that has closed nothing waits
            found.append(said(Texts(three[rank]).exchange, "memory|"))  # type: ignore[arg-type]
        return found

    right = str(["memory|"] * 3)
    first, second, third = on_ranks(3, again)
    assert second == [right]
    for found in (first, third):
        assert (
            "PeerTimeout" in found[0]
            and "rank 1, which has closed its workspace" in found[0]
            and found[1] == right
        )


def test_allocation_and_call_comparison_report_the_same_mismatch(three: list[Rank]) -> None:
    texts = Texts(three[0])  # type: ignore[arg-type]
    calls = [
        lambda: texts.exchange("memory|1||"),
        *[lambda rank=rank: agree("a call", three[rank]) for rank in (1, 2)],
    ]  # type: ignore[arg-type,misc]
    one, *others = on_ranks(3, lambda rank: said(calls[rank]))
    assert one.startswith(
        "RankMismatchError: asked: rank 0: the first call of an operator, where the other "
        "ranks have a call"
    )
    assert others == [one, one]


class Interrupted:
    """A :meth:`Conversation.ended` to whose first call Ctrl-C comes, once ``arrived`` is set."""

    def __init__(self, talk: Conversation, arrived: threading.Event) -> None:
        self._ended, self._arrived, self._armed = talk.ended, arrived, True

    def __call__(self, seconds: float) -> bool:
        if self._armed:
            self._armed = False
            assert self._arrived.wait(10)
            raise KeyboardInterrupt
        return self._ended(seconds)


@pytest.mark.parametrize("how", ["timed out", "interrupted"])
@pytest.mark.parametrize("late", [True, False], ids=["after the others", "before them"])
def test_timeout_as_the_last_rank_arrives_is_consistent(
    three, monkeypatch, late: bool, how: str
) -> None:
    """Rank 2 stops waiting when all texts are there. No other rank goes on alone into a
    collective."""
    decided, arrived = threading.Event(), threading.Event()
    wait, begin = Conversation.wait, Conversation.__init__

    def held(talk: Conversation, keys: list[str], store: dist.Store, seconds: float) -> bool:
        if not wait(talk, keys, store, seconds):
            return False  # the next meeting, to which rank 2 does not come
        if talk.of_rank_2:  # type: ignore[attr-defined]
            arrived.set()
            assert not late or decided.wait(10)
            return False
        assert late or decided.wait(10)
        return True

    def marked(talk: Conversation, group: Rank, seconds: float) -> None:
        begin(talk, group, seconds)  # type: ignore[arg-type]
        talk.of_rank_2 = group.rank == 2  # type: ignore[attr-defined]
        if talk.of_rank_2 and how == "interrupted":  # type: ignore[attr-defined]
            talk.ended = Interrupted(talk, arrived)

    def rank_of(rank: int) -> str:
        try:
            return said(lambda: meet(f"{rank}", three[rank], "a call")[1])
        except KeyboardInterrupt:
            return "KeyboardInterrupt"
        finally:
            if (rank == 2) != late:
                decided.set()

    monkeypatch.setattr(Conversation, "wait", held)
    monkeypatch.setattr(Conversation, "__init__", marked)
    found = on_ranks(3, rank_of)
    met = "['0', '1', '2']"
    if late:  # another rank has gone on already
        assert found == [met, met, met if how == "timed out" else "KeyboardInterrupt"]
    else:
        assert [text.partition(":")[0] for text in found[:2]] == ["PeerTimeout"] * 2
        assert found[2].startswith("PeerTimeout" if how == "timed out" else "KeyboardInterrupt")


def test_threads_and_connections_do_not_add_up(three: list[Rank]) -> None:
    before = len(group_store._CONNECTIONS)
    for n in range(20):
        on_ranks(3, lambda rank, n=n: meet(f"{n}", three[rank], "a call"))
    names = [thread.name for thread in threading.enumerate()]
    assert "tileweave-store" not in names and len(group_store._CONNECTIONS) <= before + 3


def test_store_that_does_not_answer(three: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """The call ends in time. What its thread was about to ask is not asked any more."""
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", "0.1")
    monkeypatch.setattr(group_store, "GRACE", 0.1)
    resumed, connect = threading.Event(), group_store._connection

    def stopped(group: dist.ProcessGroup) -> dist.Store:
        assert resumed.wait(10)
        return connect(group)

    with monkeypatch.context() as patch:
        patch.setattr(group_store, "_connection", stopped)
        began = time.monotonic()
        text = said(meet, "0", three[0], "a call")
        assert time.monotonic() - began < 1.0
    assert text.startswith("PeerTimeout: a call: rank 0 waited 0.1 s for the store of its group")
    before = threading.active_count()
    resumed.set()
    while threading.active_count() >= before:
        time.sleep(0.01)
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", "5")
    found = on_ranks(3, lambda rank: meet(f"{rank}", three[rank], "a call"))
    assert found == [(1, ["0", "1", "2"])] * 3


class Stopped(dist.Store):
    """A store that answers nothing before it is resumed, then does what it was asked."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.resumed = store, threading.Event()

    def add(self, key: str, value: int) -> int:
        assert self.resumed.wait(10)
        return self.store.add(key, value)

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)
        time.sleep(0.1)  # peers read it before this rank does anything else

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.store.compare_set(key, expected, desired)


def test_peers_do_not_go_on_with_a_call_that_a_silent_store_ended(
    three: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the ended call still adds its text. Peers that find it wait for the next."""
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", "0.1")
    monkeypatch.setattr(group_store, "GRACE", 0.1)
    stopped = Stopped(three[0].store)
    group_store._CONNECTIONS[three[0]] = stopped  # type: ignore[index]
    text = said(meet, "old", three[0], "a call")
    assert "PeerTimeout: a call: rank 0 waited 0.1 s for the store of its group" in text
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", "5")
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(meet, f"{rank}", three[rank], "a call") for rank in (1, 2)]
        time.sleep(0.1)
        stopped.resumed.set()
        time.sleep(0.3)
        found.append(pool.submit(meet, "0", three[0], "a call"))
        assert [job.result(timeout=10) for job in found] == [(2, ["0", "1", "2"])] * 3


def test_store_that_is_gone(three: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> bool:
        raise dist.DistNetworkError("Failed to recv, got 0 bytes")

    monkeypatch.setattr(Conversation, "wait", gone)
    with pytest.raises(tw.PeerTimeout, match="lost its connection to the store") as caught:
        meet("0", three[0], "a call")  # type: ignore[arg-type]
    assert caught.value.at == "store" and "Remedy" in str(caught.value)
    assert isinstance(caught.value.__cause__, dist.DistNetworkError)


def test_a_connection_that_broke_is_not_used_again(
    three: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store may be reached again, but not through the old connection."""

    class Broken(Stopped):
        def add(self, key: str, value: int) -> int:
            raise dist.DistNetworkError("Broken pipe")

        compare_set = set = check = get = add  # type: ignore[assignment]

    group_store._CONNECTIONS[three[0]] = Broken(three[0].store)  # type: ignore[index]
    assert "lost its connection to the store" in said(meet, "0", three[0], "a call")
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", "5")
    found = on_ranks(3, lambda rank: meet(f"{rank}", three[rank], "a call"))
    assert found == [(1, ["0", "1", "2"])] * 3


def test_variables_are_on_in_every_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks must not differ in them, so each spelling that triton takes counts as on."""
    for number, name in enumerate(rendezvous._SWITCHES):
        monkeypatch.setattr(rendezvous, "rail_asked", lambda: rendezvous.RAILS[0])
        for other in rendezvous._SWITCHES:
            monkeypatch.delenv(other, raising=False)
        for value in ("1", "true", "True", "yes", "on", "Y", "0", "false", "", "no"):
            monkeypatch.setenv(name, value)
            on = value.lower() in ("1", "true", "yes", "on", "y")
            assert rendezvous._switches() == "".join(
                str(int(on and at == number)) for at in range(3)
            )
    monkeypatch.delenv(rendezvous._SWITCHES[-1])
    monkeypatch.setattr(rendezvous, "rail_asked", lambda: rendezvous.RAILS[1])
    assert rendezvous._switches() == "001"


def test_no_thread_is_left_after_an_answer(three, monkeypatch) -> None:
    """The interpreter may exit next, which aborts the process if a thread is in torch's C++."""
    answer = Conversation._run

    def slow(talk: Conversation, function: Callable[[Conversation], object]) -> None:
        answer(talk, function)
        time.sleep(0.1)

    monkeypatch.setattr(Conversation, "_run", slow)
    assert group_store.ask_store(three[0], "a call", 5.0, lambda talk: talk.store.add("n", 2)) == 2
    assert "tileweave-store" not in [thread.name for thread in threading.enumerate()]
