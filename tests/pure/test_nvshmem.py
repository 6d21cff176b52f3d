"""NVSHMEM without NVSHMEM: what is asked for, what is missing, its memory, and how kernels are
launched. ``tests/cpu/test_nvshmem_rail.py`` moves data."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tileweave.commands import doctor
from tileweave.errors import InputError, UnsupportedError
from tileweave.kernels import rail
from tileweave.transport import nvshmem
from tileweave.transport.nvshmem import Heap, heap_bytes, heap_of, rail_asked, why_missing

CPU = torch.device("cpu")
T = TypeVar("T")


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWEAVE_RAIL", raising=False)
    assert rail_asked() == "nccl" and heap_bytes() == 512 << 20
    for text, asked in (("", "nccl"), ("nccl", "nccl"), ("nvshmem", "nvshmem")):
        monkeypatch.setenv("TILEWEAVE_RAIL", text)
        assert rail_asked() == asked
    monkeypatch.setenv("TILEWEAVE_RAIL", "gloo")
    with pytest.raises(InputError, match="TILEWEAVE_RAIL='gloo'; allowed: nccl, nvshmem; remedy"):
        rail_asked()
    monkeypatch.setenv("TILEWEAVE_NVSHMEM_MB", "256")
    assert heap_bytes() == 256 << 20
    for text in ("127", "-300", "1e3", "٣٠٠"):
        monkeypatch.setenv("TILEWEAVE_NVSHMEM_MB", text)
        with pytest.raises(InputError, match="allowed: megabytes, 128 to"):
            heap_bytes()


def test_parts_of_the_heap_do_not_overlap() -> None:
    heap, end = Heap(torch.zeros(8192, dtype=torch.uint8), [0, 7]), 0
    for nbytes in (1, 1024, 1025, 3072):
        begin, failure = heap.take(nbytes)
        assert begin >= end and begin % 1024 == 0 and not failure
        end = begin + nbytes
    assert heap.take(1025)[1] == "1024 are left of TILEWEAVE_NVSHMEM_MB"
    assert heap.take(1024) == (7168, "")


# --- What is missing ---


def found(reason: type[Exception] | None = None, built: bool = True) -> str:
    """What is said of a torch with CUDA whose search for the device library raises ``reason``."""
    with (
        mock.patch.object(torch.version, "cuda", "13.0"),
        mock.patch.object(symm_mem, "is_nvshmem_available", return_value=built),
        mock.patch.object(nvshmem, "device_library", side_effect=reason and reason("no word")),
    ):
        return why_missing()


def test_what_is_missing() -> None:
    assert found() == ""
    assert "is without NVSHMEM, or finds no libnvshmem_host.so" in found(built=False)
    assert "no libnvshmem_device.bc (package nvidia-nvshmem-cu13" in found(RuntimeError)
    assert "has no NVSHMEM for Triton: no word" in found(ImportError)
    if torch.version.cuda is None:
        assert why_missing() == f"torch {torch.__version__} has no CUDA"


def test_doctor_says_whether_it_is_there() -> None:
    with mock.patch.object(doctor, "why_missing", return_value=""):
        assert "never run across a network" in doctor._nvshmem().value
    with mock.patch.object(doctor, "why_missing", return_value="no library"):
        assert doctor._nvshmem().value.startswith("not here: no library; NCCL")
    with mock.patch.object(doctor, "why_missing", side_effect=ImportError):
        assert "no symmetric memory" in doctor._nvshmem().value


# --- The first call ---


class Job:
    """Rank 0 of a job of ``size`` ranks, of which others say ``theirs``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: list[int], size: int) -> None:
        self.group, self.theirs, self.told = object(), "memory of NVSHMEM|512|", []
        monkeypatch.delenv("TILEWEAVE_NVSHMEM_MB", raising=False)
        monkeypatch.setattr(nvshmem, "_HEAPS", [])
        monkeypatch.setattr(nvshmem, "why_missing", lambda: "")
        monkeypatch.setattr(nvshmem, "_make", self.make)
        monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
        monkeypatch.setattr(dist, "get_world_size", lambda g=None: len(ranks) if g else size)
        monkeypatch.setattr(dist, "get_global_rank", lambda g, rank: ranks[rank])
        self.failure: RuntimeError | None = None

    def make(self, nbytes: int, device: torch.device, mapped: bool) -> Heap:
        if self.failure:
            raise self.failure
        self.told.append(f"made {nbytes >> 20} {mapped}")
        return Heap(torch.zeros(1024, dtype=torch.uint8), [0, 0])

    def exchange(self, text: str) -> list[str]:
        self.told.append(text)
        return [text, self.theirs]

    def call(self) -> Heap:
        return heap_of(self.group, CPU, True, self.exchange)  # type: ignore[arg-type]


def test_all_ranks_make_the_heap_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(monkeypatch, [0, 1], 2)
    with caplog.at_level(logging.WARNING, "tileweave"):
        heap = job.call()
    assert job.call() is heap
    assert job.told == [job.theirs, "made 512 True", job.theirs]
    assert [record.message for record in caplog.records] == [
        "TILEWEAVE_RAIL=nvshmem: all symmetric memory is NVSHMEM's, 512 MB on each rank; this was "
        "never run across a network"
    ]


@pytest.mark.parametrize("ranks", [[0, 1], [1, 0, 2]])
def test_a_first_call_of_some_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, ranks: list[int]
) -> None:
    job = Job(monkeypatch, ranks, 3)
    with pytest.raises(InputError, match=rf"a group of {len(ranks)} of 3 ranks; allowed: a first"):
        job.call()
    assert not job.told


def test_what_one_rank_lacks_all_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, [0, 1], 2)
    job.theirs += "no library"
    with pytest.raises(UnsupportedError, match="but rank 1: no library; allowed: a torch with"):
        job.call()
    job.theirs = "memory of NVSHMEM|256|"
    with pytest.raises(InputError, match="TILEWEAVE_NVSHMEM_MB=512, 256 by rank; allowed"):
        job.call()
    job.theirs, job.failure = "memory of NVSHMEM|512|", RuntimeError("Backend in use")
    with pytest.raises(UnsupportedError, match="but rank 0: RuntimeError: Backend in use; allowed"):
        job.call()
    job.failure = None
    assert job.call() is not None


# --- Kernels ---


def test_a_kernel_is_initialised_before_its_first_launch() -> None:
    done: list[object] = []

    class Compiled:
        module = 77

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *given: done.append((grid, given))

    class Kernel:
        arg_names = ("a", "b", "UNIT", "BLOCK")

        def warmup(self, *words: int, **options: object) -> Compiled:
            done.append((len(words), options["UNIT"], options["extern_libs"]))
            return Compiled()

    kernel = Kernel()
    how: Any = (kernel, 4, 0, "library.bc", done.append)
    with mock.patch.object(rail, "_LAUNCHES", {}):
        assert not rail.is_ready(kernel, 4, 0)
        rail.launch_of(*how)(5, 6)
        assert rail.is_ready(kernel, 4, 0) and not rail.is_ready(kernel, 4, 1)
        rail.launch_of(*how)(7, 8)
    compiled = (2, 4, {"libnvshmem_device": "library.bc"})
    launches = [((rail.CHANNELS, 1, 1), (a, b, 4, rail._BLOCK)) for a, b in ((5, 6), (7, 8))]
    assert done == [compiled, 77, *launches]


# --- The protocol of a pair, in all interleavings ---


class State(NamedTuple):
    """Of two ranks. steps: puts and takes done. flying: transfers put by a rank, not yet arrived.
    held: the transfer in each slot. signal: the last that arrived."""

    steps: tuple[int, ...] = (0, 0)
    flying: tuple[tuple[int, ...], ...] = ((), ())
    held: tuple[tuple[int, ...], ...] = ()
    signal: tuple[int, ...] = (0, 0)


def changed(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])


def following(now: State, slots: int, transfers: int) -> Iterator[State | None]:
    """What may come next; None where a rank takes what another transfer has overwritten."""
    for me, other in ((0, 1), (1, 0)):
        if now.flying[me]:
            first, *rest = now.flying[me]
            memory = changed(now.held[other], first % slots, first)
            yield State(
                now.steps,
                changed(now.flying, me, tuple(rest)),
                changed(now.held, other, memory),
                changed(now.signal, other, first),
            )
        number, takes = now.steps[me] // 2 + 1, now.steps[me] % 2
        if number > transfers or (takes and now.signal[me] < number):
            continue
        done = now._replace(steps=changed(now.steps, me, now.steps[me] + 1))
        if not takes:
            yield done._replace(flying=changed(now.flying, me, (*now.flying[me], number)))
        else:
            yield done if now.held[me][number % slots] == number else None


def outcomes(slots: int, transfers: int) -> set[str]:
    """Of every way in which two ranks may go through ``transfers``: each puts and takes in turn,
    and what was put arrives at any later time, in order."""
    found, left = set(), [State(held=((0,) * slots,) * 2)]
    seen = set(left)
    while left:
        now = left.pop()
        states = list(following(now, slots, transfers))
        if not states:
            found.add("done" if min(now.steps) == 2 * transfers else "stuck")
        for state in states:
            if state is None:
                found.add("overwritten")
            elif state not in seen:
                seen.add(state)
                left.append(state)
    return found


def test_two_slots_are_enough_and_one_is_not() -> None:
    assert outcomes(2, 7) == {"done"}
    assert "overwritten" in outcomes(1, 3)
