"""Bodies of the device words for the Triton interpreter: plain Python over memory that processes share.

The interpreter runs a kernel's programs one after another in the calling thread, so a wait here sleeps between polls
and can raise. x86 and Arm hosts order the interpreter's stores (each is a library call), so a 4-byte store is a release.

``OBSERVERS`` sees every signal, wait and put, in the order of this rank: traces, statistics and schedule exploration
hook in here.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np
import triton.language as tl

# Called with (event, details); see the calls of `_tell` below for the events there are.
OBSERVERS: list[Callable[[str, dict[str, int]], None]] = []

_EPOCH, _LEAVERS, _FAULT, _TIMEOUT_US = 0, 1, 2, 3


class WaitExpired(RuntimeError):
    """A wait ran out of time; the launcher turns the report behind it into ``PeerTimeout``."""


def _tell(event: str, **details: int) -> None:
    for observer in OBSERVERS:
        observer(event, details)


def _value(x: object) -> int:
    """A scalar of the interpreter (or of Python) as an int."""
    x = getattr(x, "value", x)  # a constexpr
    handle = getattr(x, "handle", None)
    return int(x) if handle is None else int(np.asarray(handle.data).reshape(-1)[0])  # type: ignore[arg-type]


def _word(address: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(address)


def _scalar(value: int, dtype: tl.dtype = tl.int32) -> object:
    from triton.runtime.interpreter import interpreter_semantic

    return interpreter_semantic.to_tensor(value, False).to(dtype)


def clock() -> object:
    return _scalar(time.perf_counter_ns(), tl.int64)


def wait(signals: object, count: object, epoch: object, first: object, unit: object, control: object, report: object):
    base, number, expected, index = _value(signals), _value(count), _value(epoch), _value(first)
    block = _value(control)
    limit = _word(block + 4 * _TIMEOUT_US).value * 1e-6
    started = time.perf_counter()
    _tell("wait", signal=index, count=number, epoch=expected, unit=_value(unit))
    for i in range(index, index + number):
        polls = 0
        while np.int32(np.uint32(_word(base + 4 * i).value - expected & 0xFFFFFFFF)) < 0:
            polls += 1
            time.sleep(0 if polls < 50 else 2e-4)
            if time.perf_counter() - started > limit:
                _expire(_value(report), block, i, _value(unit), expected, _word(base + 4 * i).value)
    _tell("waited", signal=index, count=number, epoch=expected, unit=_value(unit))
    return _scalar(0)


def _expire(report: int, control: int, signal: int, unit: int, expected: int, seen: int) -> None:
    for offset, value in enumerate((signal, unit, expected, seen), start=1):
        _word(report + 4 * offset).value = value
    _word(report).value = 1
    _word(control + 4 * _FAULT).value = 1
    _word(control + 4 * _TIMEOUT_US).value = 0
    raise WaitExpired(f"signal {signal}: expected {expected}, saw {seen}")


def pause() -> None:
    time.sleep(2e-4)


def count_in(counter: object) -> None:
    word = _word(_value(counter))
    word.value += 1


def expire(control: object, report: object, signal: object, unit: object, expected: object, seen: object) -> None:
    _expire(_value(report), _value(control), _value(signal), _value(unit), _value(expected), _value(seen))


def consume_token(value: object, token: object) -> object:
    return value


def notify(signal: object, epoch: object) -> None:
    _tell("notify", address=_value(signal), epoch=_value(epoch))
    _word(_value(signal)).value = np.int32(np.uint32(_value(epoch) & 0xFFFFFFFF)).item()


def notify_all(table: object, offset: object, rank: object, epoch: object, WORLD_SIZE: object, OWN: object) -> None:
    size, me, base = _value(WORLD_SIZE), _value(rank), _value(table)
    for i in range(0 if _value(OWN) else 1, size):
        address = ctypes.c_int64.from_address(base + 8 * ((me + i) % size)).value
        notify(address + 4 * _value(offset), epoch)


def fence() -> None:
    """Nothing to do: see the module's docstring."""


def drain_tma_stores() -> None:
    """Nothing to do: the interpreter has no asynchronous stores."""


def load_epoch(control: object) -> object:
    return _scalar(_word(_value(control)).value)


def faulted(control: object) -> object:
    return _scalar(_word(_value(control) + 4 * _FAULT).value)


def leave(control: object, epoch: object, num_programs: object) -> None:
    block = _value(control)
    leavers = _word(block + 4 * _LEAVERS)
    leavers.value += 1
    if leavers.value == _value(num_programs):
        leavers.value = 0
        _word(block + 4 * _EPOCH).value = np.int32(np.uint32((_value(epoch) + 1) & 0xFFFFFFFF)).item()
