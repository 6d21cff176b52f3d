"""Meetings to map symmetric memory: ranks with different histories understand each other, and nobody waits for ever.

Where there are no GPUs nothing can be mapped; what torch's C++ sends through the store is played here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

import tileweave as tw
from tileweave.transport.rendezvous import Meeting, Messages


class Exchange:
    """What torch does in a rendezvous: messages under a number that counts all it ever sent in this process."""

    def __init__(self, sent_before: int, one_by_one: bool = False) -> None:
        self.number, self.one_by_one = sent_before, one_by_one  # torch 2.11 asks one by one

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


def on_ranks(size: int, function: Callable[[int], object]) -> list:
    with ThreadPoolExecutor(size) as pool:
        return [job.result(timeout=30) for job in [pool.submit(function, rank) for rank in range(size)]]


@pytest.mark.parametrize("one_by_one", [True, False], ids=["2.11", "2.13"])
@pytest.mark.parametrize("histories", [(0, 0, 0), (7, 0, 3)], ids=["alike", "different"])
def test_histories_do_not_matter(histories: tuple[int, ...], one_by_one: bool) -> None:
    common, size = dist.HashStore(), len(histories)

    def rank(me: int) -> list[list[bytes]]:
        messages, seen = Messages(dist.PrefixStore("group", common), "test", me), []
        exchange = Exchange(histories[me], one_by_one)
        by_torch = dist.PrefixStore("torch", messages)  # calls our methods from C++, as a rendezvous does
        for n in range(3):
            messages.start_round()
            seen.append(exchange.rendezvous(by_torch, me, size, bytes([n, me, 0, 255])))
            exchange.number += me  # in between this process met others
        return seen

    first, *others = on_ranks(size, rank)
    assert first[2] == [bytes([2, r, 0, 255]) for r in range(size)] + [bytes([2, r, 0, 255]) + b"!" for r in range(size)]
    assert all(other == first for other in others)


def test_other_keys_pass() -> None:
    messages = Messages(dist.HashStore(), "test", 0)
    messages.start_round()
    keys = ["word", "topic/word/3", "topic/5", "topic/6/x"]
    for key in keys:
        messages.set(key, key)
    assert messages.multi_get(keys) == [key.encode() for key in keys]
    assert messages.check(["word"]) and messages.get("word") == b"word" and messages.add("count", 2) == 2
    messages.start_round()
    assert not messages.check(["word"]), "a round does not see another's messages"


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", "0.2")
    messages = Messages(dist.HashStore(), "test", 0)
    messages.start_round()
    with pytest.raises(tw.PeerTimeout, match=r"waited 0\.2 s for some rank"):
        Exchange(0).all_gather(messages, 0, 2, b"")


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = dist.group.WORLD
    assert found is not None
    yield found
    dist.destroy_process_group()


def test_a_meeting_is_a_group_that_torch_finds(world: dist.ProcessGroup) -> None:
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


def test_texts_of_all_ranks(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(world, torch.device("cpu"))
    assert [meeting.exchange(text) for text in ("4096||", "8192|no memory|")] == [["4096||"], ["8192|no memory|"]]
    monkeypatch.setenv("TILEWEAVE_TIMEOUT", "0.2")
    monkeypatch.setattr(dist.ProcessGroup, "size", lambda group: 2)
    with pytest.raises(tw.PeerTimeout, match="mapping symmetric memory"):
        meeting.exchange("the other rank does not come")
    meeting.close()
