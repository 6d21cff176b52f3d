"""Small kernels that `test_ptx_lint` compiles: correct ones, and wrong ones with one planted fault
each.

They use only names that exist at both ends of the supported Triton range, and nothing from
tileweave, so that the lint is tested against compilers and not against our device functions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Renamed between triton 3.6 and 3.9.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
gluon_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# ---- signals after stores


@triton.jit
def push_kernel(
    x, slot, signal, epoch, FORM: tl.constexpr, BARRIER: tl.constexpr, BLOCK: tl.constexpr
):
    """Copies a tile to ``slot``, then signals; FORM says how the signal is written."""
    at = tl.arange(0, BLOCK)
    tl.store(slot + at, tl.load(x + at))
    if FORM == "fence_too_early":
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;",
            "=r,r",
            [epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    if BARRIER:
        tl.debug_barrier()
    if FORM == "atomic":
        tl.atomic_xchg(signal, epoch, sem="release", scope="sys")
    if FORM == "release":
        tl.inline_asm_elementwise(
            "st.release.sys.global.b32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [signal, epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    if FORM == "fence":
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.relaxed.sys.global.b32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [signal, epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    if FORM == "fence_too_early":
        tl.inline_asm_elementwise(
            "st.relaxed.sys.global.b32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [signal, epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def push_descriptor_kernel(
    x_desc, slot_desc, signal, epoch, tiles, DRAIN: tl.constexpr, BLOCK: tl.constexpr
):
    """Store tiles through a descriptor, each followed by a signal."""
    for tile in range(tiles):
        slot_desc.store([tile * BLOCK, 0], x_desc.load([tile * BLOCK, 0]))
        if DRAIN:
            tl.inline_asm_elementwise(
                "cp.async.bulk.wait_group 0; mov.u32 $0, 0;",
                "=r,r",
                [tile],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        tl.debug_barrier()
        tl.atomic_xchg(signal + tile, epoch, sem="release", scope="sys")


@gluon.jit
def gluon_push_kernel(slot_desc, signal, epoch, tiles, DRAIN: gl.constexpr, BARRIER: gl.constexpr):
    """Store zero tiles with TMA, two groups per tile. DRAIN is "read", or how many groups are left
    open (0, 1, 2)."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    buffer = gl.allocate_shared_memory(slot_desc.dtype, [2, 64, 64], slot_desc.layout)
    for tile in range(tiles):
        for half in gl.static_range(2):
            tma.store_wait(1)
            buffer.index(half).store(gl.full([64, 64], 0.0, slot_desc.dtype, layout))
            fence_async_shared()
            tma_store(slot_desc, [tile * 128 + half * 64, 0], buffer.index(half))
        if DRAIN == "read":
            tma.store_wait(0)
        elif DRAIN == 0:
            gl.inline_asm_elementwise(
                "cp.async.bulk.wait_group 0; mov.u32 $0, 0;",
                "=r,r",
                [tile],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
        elif DRAIN == 1:
            gl.inline_asm_elementwise(
                "cp.async.bulk.wait_group 1; mov.u32 $0, 0;",
                "=r,r",
                [tile],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            gl.inline_asm_elementwise(
                "cp.async.bulk.wait_group 2; mov.u32 $0, 0;",
                "=r,r",
                [tile],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
        if BARRIER:
            gluon_barrier()
        gl.inline_asm_elementwise(
            "st.release.sys.global.b32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [signal + tile, epoch],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


# ---- loads after waits


@triton.jit
def spin(signal, epoch):
    while tl.atomic_add(signal, 0, sem="acquire", scope="sys") < epoch:
        pass


@triton.jit
def spin_in_asm(signal, epoch):
    """Polls in every thread; the result orders nothing unless it is used."""
    return tl.inline_asm_elementwise(
        """{ .reg .pred done; .reg .u32 seen;
             poll: ld.acquire.sys.global.u32 seen, [$1];
             setp.ge.s32 done, seen, $2;
             @!done bra poll;
             mov.u32 $0, seen; }""",
        "=r,l,r",
        [signal, epoch],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def spin_relaxed(signal, epoch):
    return tl.inline_asm_elementwise(
        """{ .reg .pred done; .reg .u32 seen;
             poll: ld.relaxed.sys.global.u32 seen, [$1];
             setp.ge.s32 done, seen, $2;
             @!done bra poll;
             mov.u32 $0, seen; }""",
        "=r,l,r",
        [signal, epoch],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def gather_matmul_kernel(
    a_desc,
    b_desc,
    c,
    signal,
    epoch,
    tiles,
    K,
    WAIT: tl.constexpr,
    FENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tiles of a @ b.T, where a arrives from peers. WAIT "tile" is correct; other waits are inside
    the pipelined loop."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if WAIT == "tile":
            spin(signal + tile, epoch)
            if FENCE:
                tl.inline_asm_elementwise(
                    "fence.proxy.async; mov.u32 $0, 0;",
                    "=r,r",
                    [tile],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )
        acc = tl.zeros((BLOCK, BLOCK), tl.float32)
        for k in tl.range(0, K, 64):
            if WAIT == "k_unused":
                spin_in_asm(signal + k // 64, epoch)
            if WAIT == "k_sometimes":  # noqa: SIM102  a constexpr test apart from one at run time
                if k % 512 == 0:
                    spin(signal + k // 512, epoch)
            a = a_desc.load([tile * BLOCK, k])
            b = b_desc.load([0, k])
            acc = tl.dot(a, b.T, acc)
        at = tl.arange(0, BLOCK)
        tl.store(c + (tile * BLOCK + at)[:, None] * BLOCK + at[None, :], acc.to(c.dtype.element_ty))


@triton.jit
def gather_matmul_pointer_kernel(
    a, b, c, signal, epoch, tiles, K, WAIT: tl.constexpr, BLOCK: tl.constexpr
):
    """The same with pointers and cp.async."""
    at, ak = tl.arange(0, BLOCK), tl.arange(0, 64)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if WAIT == "tile":
            spin(signal + tile, epoch)
        acc = tl.zeros((BLOCK, BLOCK), tl.float32)
        for k in tl.range(0, K, 64):
            if WAIT == "k_unused":
                spin_in_asm(signal + k // 64, epoch)
            left = tl.load(a + (tile * BLOCK + at)[:, None] * K + (k + ak)[None, :])
            right = tl.load(b + at[:, None] * K + (k + ak)[None, :])
            acc = tl.dot(left, right.T, acc)
        tl.store(c + (tile * BLOCK + at)[:, None] * BLOCK + at[None, :], acc.to(c.dtype.element_ty))


@triton.jit
def reduce_kernel(
    x,
    slots,
    out,
    signal,
    epoch,
    EARLY: tl.constexpr,
    RELAXED: tl.constexpr,
    FENCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = x + what the peer stored at slots[0]. x is local, so it may be read before the wait;
    the slot may not."""
    at = tl.arange(0, BLOCK)
    mine = tl.load(x + at)
    slot = tl.load(slots).to(tl.pointer_type(tl.float32))
    if EARLY:
        theirs = tl.load(slot + at)
    if RELAXED:
        spin_relaxed(signal, epoch)
    else:
        spin(signal, epoch)
    if FENCE:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;",
            "=r,r",
            [epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    if not EARLY:
        theirs = tl.load(slot + at)
    tl.store(out + at, mine + theirs)


# ---- warp specialised: a one-warp partition that waits, loads and signals


@gluon.jit
def spin_in_gluon(signal, epoch):
    seen = gl.atomic_add(signal, 0, sem="acquire", scope="sys")
    while seen < epoch:
        seen = gl.atomic_add(signal, 0, sem="acquire", scope="sys")


@gluon.jit
def consumer(buffer, ready, free, out, tiles):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    for tile in range(tiles):
        mbarrier.wait(ready, tile & 1)
        gl.store(out + (tile * 64 + rows)[:, None] * 64 + columns[None, :], buffer.load(layout))
        mbarrier.arrive(free, count=1)


@gluon.jit
def producer(
    a_desc,
    buffer,
    ready,
    free,
    signal,
    done,
    epoch,
    n,
    FENCE: gl.constexpr,
    LATE: gl.constexpr,
    BARRIER: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, layout=layout)
    for tile in range(n):
        if not LATE:
            spin_in_gluon(signal + tile, epoch)
        if FENCE:
            gl.inline_asm_elementwise(
                "fence.proxy.async; mov.u32 $0, 0;",
                "=r,r",
                [tile],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
        mbarrier.wait(free, (tile & 1) ^ 1)
        mbarrier.expect(ready, 64 * 64 * 2)
        tma_load(a_desc, [tile * 64, 0], ready, buffer)
        if LATE:
            spin_in_gluon(signal + tile, epoch)
        gl.store(done + 64 + lane, lane)
        if BARRIER:
            gluon_barrier()
        gl.inline_asm_elementwise(
            "st.release.sys.global.b32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [done, epoch],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def specialised_kernel(
    a_desc,
    out,
    signal,
    done,
    epoch,
    tiles,
    FENCE: gl.constexpr,
    LATE: gl.constexpr,
    BARRIER: gl.constexpr,
):
    buffer = gl.allocate_shared_memory(a_desc.dtype, [64, 64], a_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.init(free, count=1)
    gl.warp_specialize(
        [
            (consumer, (buffer, ready, free, out, tiles)),
            (
                producer,
                (a_desc, buffer, ready, free, signal, done, epoch, tiles, FENCE, LATE, BARRIER),
            ),
        ],
        [1],
        [24],
    )
