"""Signals, waits and epochs in Triton: device functions that order data between ranks.

A *signal* is an int32 in symmetric memory; its value is an *epoch*, the number of a call. Epochs
only grow, signals are never reset, and a wait ends when ``signal - epoch >= 0`` in 32-bit
arithmetic, which is safe when the count wraps.

These functions take pointers. Kernels call them by ``peers.py``, which takes an instance as a
whole.

Which function to use when:

==========================  ======================================================================
``notify``, ``notify_all``  after plain stores: all of this program's stores are visible to any
                            thread that observes the signal
``drain_tma_stores``        before ``notify``, if stores went through ``tensor_descriptor.store``
``wait``                    before loads of what was notified; returns a *token*
``wait_here``               the same for a counter that programs of this device write with release
``refuse_later``            after a wait, where a signal of a later call means that its rank gave
                            this call up
``consume_token``           for loads in a loop that contains the wait: the software pipeliner
                            would move them before it
``fence``                   a full fence over all GPUs of the host; ``wait`` and ``notify`` contain
                            the fences that they need
``acquire``                 the half of it that orders loads: part of ``wait``; after your own polls
``load_epoch``              the number of this call, once at the start of a program
``leave``, ``leave_early``  once at the end of a program (in the middle of it): the last program
                            advances the epoch for the next call
``last_to_leave``,          the two halves of ``leave``, for what only the last program may do,
``advance``                 such as ``poison`` over what others store
``count_in``                after plain stores that this device's copy engine copies further
``count_last``              after plain stores of one of several programs: the last of them may
                            ``notify``
``poison``                  over a result that must not pass for right
``pause``, ``expire``       in loops that poll data instead of signals (``self_signaling.py``)
``multiprocessor``          where a program runs: for roles that need a multiprocessor to themselves
``faulted``                 whether a wait of this rank timed out, so that a result must be poisoned
``call_done``               the call that a rank says it has done: after a fault the one before
==========================  ======================================================================

The *control block* and the *report* are described in ``transport/protocol.py``.

Every wait is bounded. One that times out writes the report, sets ``fault`` and sets the limits for
data and meetings to zero, for every instance of the group (``transport/shared_fault.py``), so that
waits for other ranks return at once. The kernel ends, its results are NaN, and the host raises
``PeerTimeout``.

Verified in the PTX of Triton 3.6 to 3.9 (``tests/compile``): a release atomic is *not* preceded by
a CTA barrier, so ``notify`` has its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq, is_hip

from tileweave.device.triton import record
from tileweave.device.triton.record import HERE
from tileweave.transport import protocol

# The numbers of the protocol, for Triton and Gluon
EPOCH = tl.constexpr(protocol.EPOCH)
LEAVERS = tl.constexpr(protocol.LEAVERS)
FAULT = tl.constexpr(protocol.FAULT)
TIMEOUT_US = tl.constexpr(protocol.TIMEOUT_US)
MEETING_US = tl.constexpr(protocol.MEETING_US)
PUSHED_US = tl.constexpr(protocol.PUSHED_US)
TABLE_RANKS = tl.constexpr(protocol.TABLE_RANKS)
TABLE_RANK = tl.constexpr(protocol.TABLE_RANK)
TABLES = tl.constexpr(protocol.TABLES)
NUM_TABLES = tl.constexpr(protocol.NUM_TABLES)
MAX_SLICES = tl.constexpr(protocol.MAX_SLICES)
REDUCED = tl.constexpr(protocol.REDUCED)
LATE = tl.constexpr(protocol.LATE)
GONE = tl.constexpr(protocol.GONE)
REPORT_SIGNAL = tl.constexpr(protocol.REPORT_SIGNAL)
REPORT_UNIT = tl.constexpr(protocol.REPORT_UNIT)
REPORT_EXPECTED = tl.constexpr(protocol.REPORT_EXPECTED)
REPORT_SEEN = tl.constexpr(protocol.REPORT_SEEN)
REPORT_MEMBER = tl.constexpr(protocol.REPORT_MEMBER)
NEXT = tl.constexpr(protocol.NEXT)
GROUP = tl.constexpr(protocol.GROUP)
MEMBER = tl.constexpr(protocol.MEMBER)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def clock():
    """Nanoseconds of a clock that all programs of a device share (``%globaltimer``; 0 where there
    is none)."""
    if is_hip():
        return tl.cast(0, tl.int64)
    else:
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def multiprocessor():
    """The number of the multiprocessor that this program runs on (0 where there is none). For roles
    that any program may take."""
    if is_hip():
        return tl.cast(0, tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def fence():
    """Order all memory operations of each thread before all later ones, for every GPU of the host.

    Returns 0. The compiler does not know that value, so code that depends on it stays after the
    fence.
    """
    if is_hip():
        tl.debug_barrier()
        return tl.cast(0, tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def acquire():
    """Order loads of signals before all later loads: the half of :func:`fence` that a wait needs.

    From Hopper on. A full fence also waits for stores, which costs 3 to 7 us where the
    multiprocessor has many under way. Older devices get the full fence: ptxas accepts the narrow
    one for them without a warning, and makes an illegal instruction of it.
    """
    if cuda_capability_geq(9, 0):
        return tl.inline_asm_elementwise(
            "fence.acquire.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return fence()


@triton.jit
def drain_tma_stores():
    """Wait until this program's ``tensor_descriptor`` stores are visible, not only read.

    What ``store`` emits itself ends in ``wait_group.read``: the source may be overwritten, the data
    may be under way.
    """
    if not is_hip():
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.u32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def notify(signal, epoch):
    """Store ``epoch`` in ``signal`` (int32 pointer, usually a peer's), after all stores of this
    program.

    The barrier makes every thread's stores precede the release of the one thread that signals.
    """
    tl.debug_barrier()
    tl.atomic_xchg(signal, epoch, sem="release", scope="sys")


@triton.jit
def notify_all(table, offset, rank, epoch, WORLD_SIZE: tl.constexpr, OWN: tl.constexpr):
    """:func:`notify` every peer at index ``offset`` of its signals (``OWN``: this rank too), all at
    once.

    One lane per peer, at most 8: the time of a release fence is paid once, not R - 1 times.
    ``table``: as for ``symm_at``.
    """
    lane = tl.arange(0, 8)
    count: tl.constexpr = WORLD_SIZE if OWN else WORLD_SIZE - 1
    peer = (rank + (0 if OWN else 1) + lane) % WORLD_SIZE
    signals = tl.load(table + peer).to(tl.pointer_type(tl.int32), bitcast=True) + offset
    tl.debug_barrier()
    tl.atomic_xchg(
        signals, tl.zeros_like(lane) + epoch, mask=lane < count, sem="release", scope="sys"
    )


@triton.jit
def pause():
    """Between two polls of a loop that waits: nothing on a GPU; the interpreter lets other ranks
    run."""


@triton.jit
def count_in(counter):
    """Count this program's stores in at ``counter``, for a copy engine of this device that waits
    for a number of them."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="sys")


@triton.jit
def count_last(counter, total):
    """Count this program's stores in at ``counter``. Returns whether this was the last of ``total``
    counts: then ``counter`` is 0 again, and ``notify`` may follow."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == total - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def poison(target, size, BLOCK: tl.constexpr):
    """After a time-out: NaN over these elements, so that none of them passes for right."""
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(target + at, float("nan"), mask=at < size)


# $1: control + FAULT; $2: report; $3 to $6: signal, unit, epochs expected and seen. FAULT is set
# first, then two limits to a 0 computed from what it was: a wait that stops for such a limit finds
# FAULT set, and reports nothing. LEAVERS has it before this program leaves: the last may have read
# FAULT already. In the same way the group's FAULT is set before the limits of other instances. The
# list of blocks was written before the kernel began.
_WORDS = {
    "leavers": protocol.LEAVERS,
    "data": protocol.TIMEOUT_US,
    "meeting": protocol.MEETING_US,
    "group": protocol.GROUP,
    "member": protocol.MEMBER,
}
_FROM_FAULT = {name: 4 * (word - protocol.FAULT) for name, word in _WORDS.items()}
EXPIRE = tl.constexpr(f"""{{
    .reg .pred first, ended;
    .reg .b32 word;
    .reg .b64 block;
    atom.relaxed.gpu.global.exch.b32 word, [$1], 1;
    setp.eq.s32 first, word, 0;
    shr.u32 $0, word, 1;
    @!first bra over;
    red.relaxed.gpu.global.add.s32 [$1+{_FROM_FAULT["leavers"]}], {protocol.LATE};
    ld.global.b64 block, [$1+{_FROM_FAULT["group"]}];
    atom.relaxed.gpu.global.exch.b32 word, [block+{4 * protocol.FAULT}], 1;
    setp.ne.s32 ended, word, 0;
    @ended bra over;
    or.b32 $0, $0, word;
    ld.global.b32 word, [$1+{_FROM_FAULT["member"]}];
    st.relaxed.sys.global.b32 [$2+{4 * protocol.REPORT_SIGNAL}], $3;
    st.relaxed.sys.global.b32 [$2+{4 * protocol.REPORT_UNIT}], $4;
    st.relaxed.sys.global.b32 [$2+{4 * protocol.REPORT_EXPECTED}], $5;
    st.relaxed.sys.global.b32 [$2+{4 * protocol.REPORT_SEEN}], $6;
    st.relaxed.sys.global.b32 [$2+{4 * protocol.REPORT_MEMBER}], word;
    st.release.sys.global.b32 [$2], 1;
walk:
    ld.global.b64 block, [block+{4 * protocol.NEXT}];
    setp.eq.s64 ended, block, 0;
    @ended bra over;
    st.relaxed.gpu.global.b32 [block+{4 * protocol.TIMEOUT_US}], $0;
    st.relaxed.gpu.global.b32 [block+{4 * protocol.MEETING_US}], $0;
    bra walk;
over:
    st.global.b32 [$1+{_FROM_FAULT["data"]}], $0;
    st.global.b32 [$1+{_FROM_FAULT["meeting"]}], $0;
}}""")


@triton.jit
def _block_at(word):
    """The control block whose address (int64) is at ``word``, as an address."""
    return tl.load(word.to(tl.pointer_type(tl.int64), bitcast=True))


@triton.jit
def expire(control, report, signal, unit, expected, seen):
    """Report a wait that timed out, the first one of the group only, and let later ones of all its
    instances pass (but for ``PUSHED_US``).

    Each thread by itself and without a barrier: warps poll one by one, so what is late for one may
    have come for the next.
    """
    if is_hip():
        if tl.atomic_xchg(control + FAULT, 1, sem="relaxed", scope="gpu") == 0:
            tl.atomic_add(control + LEAVERS, LATE, sem="relaxed", scope="gpu")
            group = _block_at(control + GROUP).to(tl.pointer_type(tl.int32), bitcast=True)
            if tl.atomic_xchg(group + FAULT, 1, sem="relaxed", scope="gpu") == 0:
                tl.store(report + REPORT_SIGNAL, signal)
                tl.store(report + REPORT_UNIT, unit)
                tl.store(report + REPORT_EXPECTED, expected)
                tl.store(report + REPORT_SEEN, seen)
                tl.store(report + REPORT_MEMBER, tl.load(control + MEMBER))
                tl.debug_barrier()
                tl.atomic_xchg(report, 1, sem="release", scope="sys")
                address = _block_at(group + NEXT)
                while address != 0:
                    block = address.to(tl.pointer_type(tl.int32), bitcast=True)
                    tl.store(block + TIMEOUT_US, 0)
                    tl.store(block + MEETING_US, 0)
                    address = _block_at(block + NEXT)
        tl.store(control + TIMEOUT_US, 0)
        tl.store(control + MEETING_US, 0)
    else:
        tl.inline_asm_elementwise(
            EXPIRE,
            "=r,l,l,r,r,r,r",
            [control + FAULT, report, expected * 0 + signal, expected * 0 + unit, expected, seen],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _wait_one(signal, epoch):
    """Spin with scalar acquire atomics, at most 2**27 times: the portable poll, for targets with no
    clock word."""
    seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    polls = 0
    while (seen - epoch < 0) & (polls < 1 << 27):
        seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
        polls += 1
    return seen


@triton.jit
def _lag(seen, epoch, EXACT: tl.constexpr):
    """Below zero where a wait must go on: for an older signal, and with ``EXACT`` for a newer one,
    too."""
    return tl.minimum(seen - epoch, epoch - seen) if EXACT else seen - epoch


@triton.jit
def _poll(
    signals,
    count: tl.constexpr,
    epoch,
    first,
    unit,
    control,
    report,
    LIMIT: tl.constexpr,
    EXACT: tl.constexpr,
    LOCAL: tl.constexpr = False,
):
    """Until :func:`wait` may go on, or its time is up. Orders nothing; each warp by itself, without
    a barrier. ``LOCAL``: the words are no signals, but set by programs of this device."""
    lane = tl.arange(0, count)
    words = signals + first + lane
    lag = tl.min(_lag(tl.load(words, volatile=True), epoch, EXACT), axis=0)
    if lag < 0:
        limit = tl.load(control + LIMIT, volatile=True).to(tl.int64) * 1000
        started = clock()
        while (lag < 0) & (clock() - started <= limit):
            limit = (
                tl.load(control + LIMIT, volatile=True).to(tl.int64) * 1000
            )  # a fault ends waits that have begun, too
            lag = tl.min(_lag(tl.load(words, volatile=True), epoch, EXACT), axis=0)
        record.waited(control, HERE if LOCAL else first, unit, lag, started)
        if lag < 0:
            seen = tl.load(words, volatile=True)
            late = tl.argmin(_lag(seen, epoch, EXACT), axis=0)
            expire(
                control,
                report,
                first + late,
                unit,
                epoch,
                tl.sum(tl.where(lane == late, seen, 0), axis=0),
            )


@triton.jit
def wait(
    signals,
    count: tl.constexpr,
    epoch,
    first,
    unit,
    control,
    report,
    LIMIT: tl.constexpr = TIMEOUT_US,
    EXACT: tl.constexpr = False,
):
    """Wait until ``signals[first : first + count]`` have all reached ``epoch``. Returns a token,
    always 0.

    Afterwards this program's loads see what was stored before each of those signals. Call it
    outside the loop over K, once per tile. Inside a pipelined loop pass the loads' offset through
    :func:`consume_token`.

    ``count``: a power of two, at most 32. ``unit``: the waiting unit of work, for the report.
    ``LIMIT``: the word of ``control`` that has the longest time of this wait. ``EXACT``: the signal
    of a later call counts as a time-out. For what copy engines bring after a meeting of all ranks:
    a rank in a later call has given this one up, and its copies still come, since :func:`advance`
    cannot change addresses that the host holds.
    """
    token = tl.cast(0, tl.int32)
    if is_hip():
        late, seen = token - 1, token
        for i in tl.static_range(count):
            word = _wait_one(signals + first + i, epoch)
            if _lag(word, epoch, EXACT) < 0:
                late, seen = token + first + i, word
        if late >= 0:
            expire(control, report, late, unit, epoch, seen)
    else:
        _poll(signals, count, epoch, first, unit, control, report, LIMIT, EXACT)
        token = acquire()
        tl.debug_barrier()
    return token


@triton.jit
def refuse_later(signals, epoch, index, unit, control, report):
    """A time-out if ``signals[index]`` is of a call later than ``epoch``, which a peer reaches only
    if it gave this rank up."""
    seen = tl.load(signals + index, volatile=True)
    if seen - epoch > 0:
        expire(control, report, index, unit, epoch, seen)


@triton.jit
def wait_here(words, value, index, unit, control, report, LIMIT: tl.constexpr = TIMEOUT_US):
    """:func:`wait` for ``words[index]``, which only this device's programs write, with release. It
    takes one load if the value is there.

    Warps poll one after the other and may see different values, so there is no barrier in the
    branch that only some of them take.
    """
    if is_hip():
        wait(words, 1, value, index, unit, control, report, LIMIT)
    else:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];",
            "=r,l",
            [words + index],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        if seen - value < 0:
            _poll(words, 1, value, index, unit, control, report, LIMIT, False, True)
            acquire()
        tl.debug_barrier()


@triton.jit
def consume_token(value, token):
    """``value``, made to depend on a wait's token: an edge that keeps loads at ``value`` after the
    wait."""
    return value + token


@triton.jit
def load_epoch(control):
    """The number of this call. All programs read the same one: it advances only when the last has
    left."""
    epoch = tl.load(control + EPOCH, volatile=True)
    record.began(control, epoch)
    return epoch


@triton.jit
def faulted(control):
    """Non-zero once a wait of this rank has timed out."""
    return tl.load(control + FAULT, volatile=True)


@triton.jit
def call_done(control, epoch):
    """The call that a rank tells its peers it has done: this one. After a fault the one before,
    since some stores of this call may be missing."""
    return epoch - (faulted(control) != 0).to(tl.int32)


@triton.jit
def leave(control, epoch, num_programs):
    """End of a program; the last of ``num_programs`` advances the epoch for the next call.

    To be called after everything that this program signals to peers in this call.
    """
    # A fault of an earlier call, or of this one so far. Later faults of this call are counted in
    # LEAVERS, so the last program to leave need not load FAULT again.
    fault = faulted(control)
    last, faults = _leave(control, num_programs, "acq_rel")
    if last:
        advance(control, epoch, fault + faults)


@triton.jit
def _leave(control, num_programs, SEM: tl.constexpr):
    """(whether all other programs have left, time-outs of this call)."""
    tl.debug_barrier()
    left = tl.atomic_add(control + LEAVERS, 1, sem=SEM, scope="gpu")
    record.left(control, left)
    return left % LATE == num_programs - 1, left // LATE


@triton.jit
def last_to_leave(control, num_programs):
    """Whether all other programs have left, and what they stored is visible; then this one must
    :func:`advance`."""
    return _leave(control, num_programs, "acq_rel")[0]


@triton.jit
def advance(control, epoch, fault):
    """The end of the call that :func:`last_to_leave` found. ``fault``: what :func:`faulted` said in
    it.

    After a fault no wait holds this rank. What it sends two calls later would land in the slot that
    a late rank still reads, which would take it for right. So from here on it sends to itself only:
    a late rank waits for it in vain, and reports that. Within a call nothing changes, or a signal
    might go where its data did not.
    """
    if fault != 0:
        ranks = tl.load(control + TABLE_RANKS)
        rank = tl.load(control + TABLE_RANK)
        for i in tl.static_range(NUM_TABLES):
            table = (control + TABLES + 2 * i).to(tl.pointer_type(tl.int64), bitcast=True)
            table = tl.load(table).to(tl.pointer_type(tl.int64), bitcast=True)
            for peer in range(0, ranks):
                tl.store(table + peer, tl.load(table + rank))
    tl.store(control + LEAVERS, 0)
    tl.store(control + EPOCH, epoch + 1)


@triton.jit
def leave_early(control, epoch, num_programs):
    """:func:`leave` in the middle of a program, where a wait for peers hides its time (at the end
    it takes a microsecond).

    To be called after stores, by all threads, to addresses that depend on ``epoch``: then the load
    of ``epoch`` has ended, and nothing need be released. The next call is ordered by its stream.
    Not for kernels whose copy engines read the epoch. A wait of this call may time out after it, so
    a kernel that leaves early also reads FAULT at its begin, and then sends nothing.
    """
    fault = faulted(control)
    last, faults = _leave(control, num_programs, "relaxed")
    if last:
        advance(control, epoch, fault + faults)


if INTERPRETED.value:
    from tileweave.device.interpreter import words as bodies

    if triton.__version__.startswith(
        ("3.6.", "3.7.", "3.8.", "3.9.")
    ):  # with others results are the same, but slower
        from tileweave.device.interpreter import speedups as patched

        patched.patch_once()
    clock, drain_tma_stores = bodies.clock, bodies.drain_tma_stores
    fence = acquire = bodies.fence
    multiprocessor = bodies.multiprocessor
    notify, notify_all, wait, consume_token = (
        bodies.notify,
        bodies.notify_all,
        bodies.wait,
        bodies.consume_token,
    )
    load_epoch, faulted, leave = bodies.load_epoch, bodies.faulted, bodies.leave
    leave_early, wait_here = bodies.leave, bodies.wait_here
    last_to_leave, advance = bodies.last_to_leave, bodies.advance
    pause, count_in, expire, refuse_later = (
        bodies.pause,
        bodies.count_in,
        bodies.expire,
        bodies.refuse_later,
    )
