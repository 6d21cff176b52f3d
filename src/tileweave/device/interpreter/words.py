"""Bodies of the device functions for the Triton interpreter: plain Python over memory that
processes share.

The interpreter runs a kernel's programs one after another in the calling thread, so a wait here
sleeps between polls and can raise. x86 and Arm hosts order the interpreter's stores (each is a
library call), so a 4-byte store is a release.

Words touch shared memory only through ``MEMORY``: plainly (:class:`HostMemory`) here, through a
model of weak memory in schedule exploration (``explore/memory.py``), which puts its own in place.
``OBSERVERS`` sees every signal and wait, in the order of this rank: traces, statistics and tests
hook in here.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator

import numpy as np
import triton.language as tl

from tileweave.transport import protocol

# Called with (event, details); see the calls of `_tell` below for the events there are.
OBSERVERS: list[Callable[[str, dict[str, int]], None]] = []


class WaitExpired(RuntimeError):
    """A wait timed out; the launcher turns its report into ``PeerTimeout``."""


def _tell(event: str, **details: int) -> None:
    for observer in OBSERVERS:
        observer(event, details)


def _value(x: object) -> int:
    """A scalar of the interpreter (or of Python) as an int."""
    if isinstance(x, int):
        return int(x)
    x = getattr(x, "value", x)  # a constexpr
    handle = getattr(x, "handle", None)
    if handle is None:
        return int(x)  # type: ignore[arg-type]
    return int(np.asarray(handle.data).reshape(-1)[0])


def wrapped(value: int) -> int:
    """``value`` as a 32-bit integer: epochs pass 2**31 - 1."""
    return ctypes.c_int32(value).value


class HostMemory:
    """int32 words at addresses of this process, in the order in which the words below touch
    them."""

    def load(self, address: int) -> int:
        """A plain load of a word of this rank."""
        return ctypes.c_int32.from_address(address).value

    def store(self, address: int, value: int) -> None:
        """A plain store to a word of this rank."""
        ctypes.c_int32.from_address(address).value = value

    def acquire(self, address: int) -> int:
        """A load; what its writer stored before it released is seen by later loads."""
        return self.load(address)

    def release(self, address: int, value: int) -> None:
        """A store, after all earlier stores of this program."""
        self.store(address, value)

    def add(self, address: int, value: int) -> int:
        """Add and return what was there; acquires and releases. Within one rank only."""
        before = self.load(address)
        self.store(address, wrapped(before + value))
        return before

    def pause(self, polls: int) -> None:
        """Between two polls of a word that is not there yet."""
        time.sleep(
            0 if polls < 50 else min(8e-6 * polls, 2e-3)
        )  # a small part of the time that it has waited

    def put(self, target: int, source: int, nbytes: int, signal: int, value: int) -> None:
        """Bytes, and then a word of 64 bits, of another rank."""
        ctypes.memmove(target, source, nbytes)
        ctypes.c_int64.from_address(signal).value = value

    def acquire_long(self, address: int) -> int:
        """:meth:`acquire` of a word of 64 bits."""
        return ctypes.c_int64.from_address(address).value

    def idle(self) -> None:
        """Between two polls of data."""
        time.sleep(2e-4)

    def multiprocessor(self) -> int:
        """Where the program runs: all on one."""
        return 0

    def seconds(self) -> float:
        """What waits are measured with."""
        return time.perf_counter()


MEMORY = HostMemory()


def _not_shared(rank: int, address: int) -> int:
    raise NotImplementedError("NVSHMEM has no memory on the CPU")


# (rank, an address in symmetric memory of this rank) -> the same place of that rank, mapped here
PLACE_AT: Callable[[int, int], int] = _not_shared


def _scalar(value: int, dtype: tl.dtype = tl.int32) -> object:
    from triton.runtime.interpreter import interpreter_semantic

    return interpreter_semantic.to_tensor(value, False).to(dtype)


def clock() -> object:
    return _scalar(int(MEMORY.seconds() * 1e9), tl.int64)


def multiprocessor() -> object:
    return _scalar(MEMORY.multiprocessor())


def must_wait(seen: int, expected: int, exact: object) -> bool:
    """Whether a signal is not there yet, or of a later call where ``exact``."""
    lag = wrapped(seen - expected)
    return lag < 0 or (lag > 0 and bool(_value(exact)))


def wait(
    signals: object,
    count: object,
    epoch: object,
    first: object,
    unit: object,
    control: object,
    report: object,
    LIMIT: object = protocol.TIMEOUT_US,
    EXACT: object = False,
) -> object:
    base, number, expected, index = _value(signals), _value(count), _value(epoch), _value(first)
    block = _value(control)
    limit = MEMORY.load(block + 4 * _value(LIMIT)) * 1e-6
    started = MEMORY.seconds()
    _tell("wait", signal=index, count=number, epoch=expected, unit=_value(unit))
    for i in range(index, index + number):
        polls = 0
        while must_wait(seen := MEMORY.acquire(base + 4 * i), expected, EXACT):
            polls += 1
            MEMORY.pause(polls)
            if MEMORY.seconds() - started > limit:
                _expire(_value(report), block, i, _value(unit), expected, seen)
    _tell("waited", signal=index, count=number, epoch=expected, unit=_value(unit))
    return _scalar(0)


def refuse_later(
    signals: object, epoch: object, index: object, unit: object, control: object, report: object
) -> None:
    number, expected = _value(index), _value(epoch)
    seen = MEMORY.acquire(_value(signals) + 4 * number)
    if wrapped(seen - expected) > 0:
        _expire(_value(report), _value(control), number, _value(unit), expected, seen)


def wait_here(
    words: object,
    value: object,
    index: object,
    unit: object,
    control: object,
    report: object,
    LIMIT: object = protocol.TIMEOUT_US,
) -> None:
    wait(words, 1, value, index, unit, control, report, LIMIT)


def _expire(report: int, control: int, signal: int, unit: int, expected: int, seen: int) -> None:
    """As ``signal.expire``; then it raises, where a kernel on a GPU goes on."""
    if not MEMORY.load(control + 4 * protocol.FAULT):
        MEMORY.store(control + 4 * protocol.FAULT, 1)
        MEMORY.add(control + 4 * protocol.LEAVERS, protocol.LATE)
        head = ctypes.c_int64.from_address(control + 4 * protocol.GROUP).value
        if not MEMORY.load(head + 4 * protocol.FAULT):
            MEMORY.store(head + 4 * protocol.FAULT, 1)
            words = {
                protocol.REPORT_SIGNAL: signal,
                protocol.REPORT_UNIT: unit,
                protocol.REPORT_EXPECTED: expected,
                protocol.REPORT_SEEN: seen,
                protocol.REPORT_MEMBER: MEMORY.load(control + 4 * protocol.MEMBER),
            }
            for word, value in words.items():
                MEMORY.store(report + 4 * word, value)
            MEMORY.store(report + 4 * protocol.REPORT_SET, 1)
            for block in blocks_after(head):
                MEMORY.store(block + 4 * protocol.TIMEOUT_US, 0)
                MEMORY.store(block + 4 * protocol.MEETING_US, 0)
    raise WaitExpired(f"signal {signal}: expected {expected}, saw {seen}")


def blocks_after(head: int) -> Iterator[int]:
    """The control blocks of the group's list."""
    block = head
    while block := ctypes.c_int64.from_address(block + 4 * protocol.NEXT).value:
        yield block


def pause() -> None:
    MEMORY.idle()


def count_in(counter: object) -> None:
    MEMORY.add(_value(counter), 1)


def expire(
    control: object, report: object, signal: object, unit: object, expected: object, seen: object
) -> None:
    _expire(
        _value(report),
        _value(control),
        _value(signal),
        _value(unit),
        _value(expected),
        _value(seen),
    )


def consume_token(value: object, token: object) -> object:
    return value


def notify(signal: object, epoch: object) -> None:
    _tell("notify", address=_value(signal), epoch=_value(epoch))
    MEMORY.release(_value(signal), _value(epoch))


def notify_all(
    table: object, offset: object, rank: object, epoch: object, WORLD_SIZE: object, OWN: object
) -> None:
    size, me, base = _value(WORLD_SIZE), _value(rank), _value(table)
    for i in range(0 if _value(OWN) else 1, size):
        address = ctypes.c_int64.from_address(base + 8 * ((me + i) % size)).value
        notify(address + 4 * _value(offset), epoch)


def put(
    target: object, source: object, nbytes: object, signal: object, value: object, pe: object
) -> None:
    to, word = (PLACE_AT(_value(pe), _value(at)) for at in (target, signal))
    MEMORY.put(to, _value(source), _value(nbytes), word, _value(value))


def await_put(signal: object, least: object, control: object) -> object:
    limit = MEMORY.load(_value(control) + 4 * protocol.TIMEOUT_US) * 1e-6
    started, polls = MEMORY.seconds(), 0
    while (seen := MEMORY.acquire_long(_value(signal))) < _value(least):
        polls += 1
        MEMORY.pause(polls)
        if MEMORY.seconds() - started > limit:
            break
    return _scalar(seen, tl.int64)


def fence() -> None:
    """Nothing to do: see the module's docstring."""


def drain_tma_stores() -> None:
    """Nothing to do: the interpreter has no asynchronous stores."""


def load_epoch(control: object) -> object:
    return _scalar(MEMORY.load(_value(control)))


def faulted(control: object) -> object:
    return _scalar(MEMORY.load(_value(control) + 4 * protocol.FAULT))


def leave(control: object, epoch: object, num_programs: object) -> None:
    fault = _value(faulted(control))
    last, faults = _leave(control, num_programs)
    if last:
        advance(control, epoch, fault + faults)


def _leave(control: object, num_programs: object) -> tuple[bool, int]:
    """(whether all others have left, time-outs of this call)."""
    faults, left = divmod(MEMORY.add(_value(control) + 4 * protocol.LEAVERS, 1), protocol.LATE)
    return left == _value(num_programs) - 1, faults


def last_to_leave(control: object, num_programs: object) -> object:
    return _scalar(int(_leave(control, num_programs)[0]))


def advance(control: object, epoch: object, fault: object) -> None:
    block = _value(control)
    if _value(fault) != 0:
        ranks, rank = (
            MEMORY.load(block + 4 * word) for word in (protocol.TABLE_RANKS, protocol.TABLE_RANK)
        )
        for i in range(protocol.NUM_TABLES):
            table = ctypes.c_int64.from_address(block + 4 * protocol.TABLES + 8 * i).value
            for peer in range(ranks):
                for half in (0, 4):
                    MEMORY.store(table + 8 * peer + half, MEMORY.load(table + 8 * rank + half))
    MEMORY.store(block + 4 * protocol.LEAVERS, 0)
    MEMORY.store(block + 4 * protocol.EPOCH, wrapped(_value(epoch) + 1))
