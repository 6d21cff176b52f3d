"""Data between two ranks of different nodes by NVSHMEM: one rank runs ``put_kernel``, the other one
``take_kernel``.

A *transfer* between two ranks is a message from each to the other (perhaps an empty one). Each rank
puts its message, then takes that of the other, by two kernels on one stream; the next transfer
follows on that stream. Transfers of a pair are numbered from 1. Program c of either kernel is
*channel* c: it moves one piece of the message, with words of its own.

=======================  ==================  ===================  ==============================
word (int64)             value               written by           read by
=======================  ==================  ===================  ==============================
signal [parity, c]       number and mark of  channel c of the     channel c of the own take
(symmetric)              the transfer        sender's put, after
                                             the piece
epoch [c] (local)        transfers taken     channel c of the     channel c of the next put and
                                             own take, last       the next take
=======================  ==================  ===================  ==============================

A message is copied into the *staging* area of the sender, since a network reads registered memory
only, put into one of two *slots* at the receiver, by the parity of the number, and copied out.

Why no slot is overwritten: transfer t + 2 is put where t was, after the sender's take of t + 1
ended. That take saw the signals of the receiver's put of t + 1, which began after the receiver's
take of t had ended, on its stream. So the slot has been read. The same holds for the signal of t:
it has its value until then, so a take finds exactly the number and the mark that it expects.

Why staging is not overwritten while a network reads it: ``put`` returns when its source may be
changed, and the next put follows on the stream.

Why no rank waits for ever: puts wait for nothing. A take waits for one put of the other rank, which
that rank queued before it took anything of this transfer, and it ends after the time limit anyway.
If the limit passes, it reports and sets FAULT, and the data that did not come becomes NaN. Later
takes do not wait, and later puts send nothing, so the other rank reports, too.

``mark``: a checksum of what the ranks must agree on, such as the size of the message. If it
differs, the take reports a fault although the number is the expected one.

A graph that has transfers is replayed like calls: numbers are in device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tileweave.device.triton.nvshmem import await_put, put
from tileweave.device.triton.signal import expire, faulted

CHANNELS = 16  # multiprocessors that a transfer occupies, at most
GRAIN = 16  # bytes that pieces are multiples of
UNITS = (8, 4, 2, 1)  # bytes of the elements by which messages are copied
_WARPS, _BLOCK = 8, 2048
_ADDRESSES = ("slots", "slot_bytes", "piece", "signals", "epochs", "mark", "control")


@triton.jit
def _words(address, UNIT: tl.constexpr):
    """``address`` as a pointer to elements of ``UNIT`` bytes."""
    address = address.to(tl.int64)  # the interpreter gives small ones 32 bits
    if UNIT == 8:
        return address.to(tl.pointer_type(tl.int64), bitcast=True)
    elif UNIT == 4:
        return address.to(tl.pointer_type(tl.int32), bitcast=True)
    elif UNIT == 2:
        return address.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        return address.to(tl.pointer_type(tl.int8), bitcast=True)


@triton.jit
def _copy(target, source, nbytes, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    to, at, count = _words(target, UNIT), _words(source, UNIT), nbytes // UNIT
    for begin in range(0, count, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        tl.store(to + i, tl.load(at + i, mask=i < count), mask=i < count)


@triton.jit
def _spoil(target, nbytes, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """All bits are set, which is NaN in every floating-point dtype."""
    to, count = _words(target, UNIT), nbytes // UNIT
    for begin in range(0, count, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        tl.store(to + i, tl.full([BLOCK], -1, to.dtype.element_ty), mask=i < count)


@triton.jit(do_not_specialize=["source", "nbytes", "staging", "pe", *_ADDRESSES])
def put_kernel(
    source: tl.int64,
    nbytes: tl.int64,
    staging: tl.int64,
    slots: tl.int64,
    slot_bytes: tl.int64,
    piece: tl.int64,
    signals: tl.int64,
    epochs: tl.int64,
    mark: tl.int64,
    control: tl.int64,
    pe: tl.int32,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``slots``, ``signals``: where those at rank ``pe`` are, as addresses of this rank. All of a
    piece is put, the end of the last pieces undefined."""
    channel, channels = tl.program_id(0), tl.num_programs(0)
    number = tl.load(_words(epochs, 8) + channel) + 1
    begin, slot = channel * piece, number & 1
    if faulted(_words(control, 4)) == 0:
        size = tl.minimum(tl.maximum(nbytes - begin, 0), piece)
        _copy(staging + begin, source + begin, size, UNIT, BLOCK)
        target = slots + slot * slot_bytes + begin
        signal = signals + 8 * (slot * channels + channel)
        put(target, staging + begin, piece, signal, number << 32 | mark.to(tl.int64), pe)


@triton.jit(do_not_specialize=["target", "nbytes", "report", "source", *_ADDRESSES])
def take_kernel(
    target: tl.int64,
    nbytes: tl.int64,
    slots: tl.int64,
    slot_bytes: tl.int64,
    piece: tl.int64,
    signals: tl.int64,
    epochs: tl.int64,
    mark: tl.int64,
    control: tl.int64,
    report: tl.int64,
    source: tl.int32,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``source``: the rank that puts, for the report."""
    channel, channels = tl.program_id(0), tl.num_programs(0)
    block = _words(control, 4)
    number = tl.load(_words(epochs, 8) + channel) + 1
    begin, slot = channel * piece, number & 1
    signal = _words(signals, 8) + slot * channels + channel
    seen = await_put(signal, number << 32, block)
    if seen != (number << 32 | mark.to(tl.int64)):
        expected, found = number.to(tl.int32), (seen >> 32).to(tl.int32)
        expire(block, _words(report, 4), source, channel, expected, found)
    # no data before all warps have seen the signal, no epoch before all have read it
    tl.debug_barrier()
    size = tl.minimum(tl.maximum(nbytes - begin, 0), piece)
    if faulted(block) == 0:
        _copy(target + begin, slots + slot * slot_bytes + begin, size, UNIT, BLOCK)
    else:
        _spoil(target + begin, size, UNIT, BLOCK)
    tl.store(_words(epochs, 8) + channel, number)


Launch = Callable[..., None]
INTERPRETED = triton.knobs.runtime.interpret
_LAUNCHES: dict[tuple[Any, int, int], Launch] = {}  # by kernel, UNIT, and device


def is_ready(kernel: Any, unit: int, device: int) -> bool:
    """Whether :func:`launch_of` has been called with these."""
    return INTERPRETED or (kernel, unit, device) in _LAUNCHES


def launch_of(
    kernel: Any, unit: int, device: int, library: str, initialise: Callable[[int], None]
) -> Launch:
    """What launches a kernel on the current stream, given its arguments but for the constants.

    Each has one variant for a unit, which is compiled here with NVSHMEM's device library
    ``library``, loaded, and initialised by ``initialise(module)``: later launches compile nothing,
    so they can be captured. (torch initialises by a hook of Triton, one for the process.)
    """
    if INTERPRETED:
        return lambda *given: kernel[(CHANNELS,)](*given, UNIT=unit, BLOCK=_BLOCK)
    found = _LAUNCHES.get((kernel, unit, device))
    if found is None:
        grid, words = (CHANNELS, 1, 1), [0] * (len(kernel.arg_names) - 2)
        compiled = kernel.warmup(
            *words,
            UNIT=unit,
            BLOCK=_BLOCK,
            grid=grid,
            num_warps=_WARPS,
            extern_libs={"libnvshmem_device": library},
        )
        run = compiled[grid]  # loads the module
        initialise(compiled.module)
        found = _LAUNCHES[kernel, unit, device] = lambda *given: run(*given, unit, _BLOCK)
    return found
