"""Words of NVSHMEM in Triton: put data into memory of any rank of the job, over any network that
NVSHMEM knows, and wait for such a put.

``put`` and ``await_put`` call functions of NVSHMEM's device library, by the names and numbers in
its headers. A kernel that calls them must be compiled with that library, and its module must be
initialised before the first launch (``kernels/rail.py``).

Addresses are those of this rank: symmetric memory is at the same offset on all ranks, and NVSHMEM
finds the place on rank ``pe``. Signals are words of 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import core

from tileweave.device.triton.signal import INTERPRETED, TIMEOUT_US, acquire, clock, fence

# NVSHMEM_SIGNAL_SET and NVSHMEM_CMP_GE of its headers, 3.3 to 3.8. torch's `_nvshmem_triton` says 0
# and 3 in its text, which are an addition between GPUs of one host, and "at most".
_SET = tl.constexpr(9)
_AT_LEAST = tl.constexpr(5)


@core.extern
def _putmem_signal_block(  # type: ignore[no-untyped-def]
    target, source, nbytes, signal, value, operation, pe, _semantic=None
):
    words, ints = (core.dtype("int64"),) * 4, (core.dtype("int32"),) * 2
    return core.extern_elementwise(
        "",
        "",
        [target, source, nbytes, signal, value, operation, pe],
        {
            (*words, core.dtype("int64"), *ints): (
                "nvshmemx_putmem_signal_block",
                core.dtype("int32"),
            )
        },
        is_pure=False,
        _semantic=_semantic,
    )


@core.extern
def _signal_wait_until(signal, comparison, value, _semantic=None):  # type: ignore[no-untyped-def]
    word = core.dtype("int64")
    return core.extern_elementwise(
        "",
        "",
        [signal, comparison, value],
        {(word, core.dtype("int32"), word): ("nvshmem_signal_wait_until", word)},
        is_pure=False,
        _semantic=_semantic,
    )


@triton.jit
def put(target, source, nbytes, signal, value, pe):
    """Put ``nbytes`` (int64) from ``source`` to ``target`` on rank ``pe``, then set ``signal``
    there to ``value``. Addresses are int64; both ends are in symmetric memory.

    All threads of the program call it together. It takes what all of them stored before, and
    returns when ``source`` may be overwritten.
    """
    fence()  # of each thread, since a network card may read what they stored
    _putmem_signal_block(target, source, nbytes, signal, value, _SET, pe)


@triton.jit
def await_put(signal, least, control):
    """Wait until ``signal`` (int64 pointer, own) is at least ``least``, for the time that
    ``control`` allows. Returns what is there.

    NVSHMEM's own wait has no limit, and no test of a signal is bound to it. So this polls by plain
    loads, and calls NVSHMEM's wait once the value is there: it returns at once, and orders the data
    of the put before later loads on every network. Each warp by itself: a barrier must follow
    before data is read.
    """
    seen = tl.load(signal, volatile=True)
    if seen < least:
        limit = tl.load(control + TIMEOUT_US, volatile=True).to(tl.int64) * 1000
        started = clock()
        while (seen < least) & (clock() - started <= limit):
            seen = tl.load(signal, volatile=True)
    if seen >= least:
        _signal_wait_until(signal.to(tl.int64, bitcast=True), _AT_LEAST, least)
    acquire()
    return seen


if INTERPRETED.value:
    from tileweave.device.interpreter import words as bodies

    put, await_put = bodies.put, bodies.await_put
