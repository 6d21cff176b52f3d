"""The Hopper twin of ``all_gather_matmul``: the same protocol and schedule, warp-specialised in Gluon.

Read ``kernels/all_gather_matmul.py`` first: equation, signals, timeline and proof are there and hold here. What differs:

- Three partitions instead of one program: *load* waits and feeds TMA, *multiply* runs wgmma and the epilogue, *move* pushes
  the own shard (``"sm"``) and copies the gathered input out, beside the other two. Only *load* waits for tiles.
- While it waits for a shard, *load* has already asked for the weights of that tile: they depend on nobody.
- A tile taller than a shard is loaded as boxes of ``BOX_M`` rows, each from one shard: no row is copied to line them up.
- Stores go by TMA where the tile is whole and the pitch allows it, else as plain masked stores. No signal follows them.

Limits: rows of x, w and the slots at a multiple of 16 bytes; ``BOX_M`` a power of two, at least 8.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileweave.config import MatmulConfig
from tileweave.kernels.endpoint import Endpoint
from tileweave.language.hopper import (
    block_barrier,
    copy_flat,
    finish,
    label,
    leave,
    load_async,
    make_ring,
    multiply_tile,
    notify,
    part_place,
    part_range,
    place,
    stamp,
    store_masked,
    store_part,
    store_tma,
    sum_parts,
    symm_at,
    unit_count,
    unit_range,
    wait,
)
from tileweave.schedule import TileSchedule, slice_bounds

MAX_SLICES = gl.constexpr(32)
MOVE_WARPS = gl.constexpr(2)
MOVE_BLOCK = 2048


@gluon.jit
def load_rows(
    x_desc, slot0_desc, slot1_desc, buffer, bar, first_row, row_limit, k, rows, rank, slot,
    WORLD_SIZE: gl.constexpr, TILE_M: gl.constexpr, BOX_M: gl.constexpr,
):  # fmt: skip
    """Ask TMA for one block of gathered rows: box by box, the own ones from x, the others from the slot."""
    for box in gl.static_range(TILE_M // BOX_M):
        row = first_row + box * BOX_M
        if row >= row_limit:  # below the last row: load something that exists, it is not stored
            row = first_row
        source = row // rows
        within = row - source * rows
        target = buffer
        if BOX_M < TILE_M:
            target = buffer.slice(box * BOX_M, BOX_M)
        if source == rank:
            load_async(x_desc, [within, k], bar, target)
        else:
            within += (rank + WORLD_SIZE - source - 1) % WORLD_SIZE * rows
            if slot == 0:
                load_async(slot0_desc, [within, k], bar, target)
            else:
                load_async(slot1_desc, [within, k], bar, target)


@gluon.jit
def load_partition(
    x_desc, slot0_desc, slot1_desc, w_desc, a_ring, b_ring, empty, ready, signals, control, report, trace,
    epoch, slot, rank, rows, num_tiles, num_whole, tail_span, tile_rows, tile_cols, k_blocks, max_units,
    WORLD_SIZE: gl.constexpr, NUM_SLICES: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    TILE_K: gl.constexpr, BOX_M: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """One warp: for each unit wait for its shards, then keep the ring full."""
    block_bytes: gl.constexpr = (TILE_M + TILE_N) * TILE_K * 2
    program = gl.program_id(0)
    whole, units = unit_count(program, gl.num_programs(0), num_tiles, num_whole, k_blocks, tail_span)
    turn = 0
    arrived = 1 << rank  # bit s: the shard of rank s is here
    for index in range(0, units):
        tile, k_begin, k_end = unit_range(
            index, whole, program, gl.num_programs(0), num_tiles, num_whole, k_blocks, tail_span
        )
        first_row, row_limit, col = place(tile, rank, WORLD_SIZE, rows, TILE_M, tile_rows, tile_cols, GROUP_M)
        record = NUM_SLICES + program * max_units + index
        label(trace, record, tile + 1, TRACE)
        stamp(trace, record, 0, epoch, TRACE)
        first = first_row // rows
        last = (gl.minimum(first_row + TILE_M, row_limit) - 1) // rows
        needed = (2 << last) - (1 << first)
        ahead = 0
        if (needed & arrived) != needed:
            ahead = gl.minimum(k_end - k_begin, STAGES)
            for step in range(0, ahead):
                at = (turn + step) % STAGES
                mbarrier.wait(empty.index(at), (((turn + step) // STAGES) & 1) ^ 1)
                mbarrier.expect(ready.index(at), block_bytes)
                load_async(w_desc, [col * TILE_N, (k_begin + step) * TILE_K], ready.index(at), b_ring.index(at))
            for source in range(first, last + 1):
                if ((arrived >> source) & 1) == 0:
                    wait(signals, source * MAX_SLICES, NUM_SLICES, epoch, tile, control, report, 1)
            arrived = arrived | needed
            for step in range(0, ahead):
                at = (turn + step) % STAGES
                load_rows(
                    x_desc, slot0_desc, slot1_desc, a_ring.index(at), ready.index(at), first_row, row_limit,
                    (k_begin + step) * TILE_K, rows, rank, slot, WORLD_SIZE, TILE_M, BOX_M,
                )  # fmt: skip
        stamp(trace, record, 1, epoch, TRACE)
        turn += ahead
        for block in range(k_begin + ahead, k_end):
            at = turn % STAGES
            mbarrier.wait(empty.index(at), ((turn // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(at), block_bytes)
            load_async(w_desc, [col * TILE_N, block * TILE_K], ready.index(at), b_ring.index(at))
            load_rows(
                x_desc, slot0_desc, slot1_desc, a_ring.index(at), ready.index(at), first_row, row_limit,
                block * TILE_K, rows, rank, slot, WORLD_SIZE, TILE_M, BOX_M,
            )  # fmt: skip
            turn += 1


@gluon.jit
def store_tile(
    tile, fault, bias, out, out_desc, buffer, first_row, row_limit, col, cols, total_rows,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, HALVES: gl.constexpr, HAS_BIAS: gl.constexpr, OUT_TMA: gl.constexpr,
):  # fmt: skip
    """Epilogue of a whole tile, in two halves where its shared-memory image would be too large."""
    width: gl.constexpr = TILE_N // HALVES
    by_tma = OUT_TMA and ((first_row + TILE_M <= row_limit) | (row_limit == total_rows))
    if HALVES == 2:
        low, high = tile.reshape((TILE_M, 2, width)).permute((0, 2, 1)).split()
        low = finish(low, fault, bias, col, cols, HAS_BIAS)
        if by_tma:
            store_tma(low, out_desc, buffer, first_row, col)
        else:
            store_masked(low, out, first_row, row_limit, col, cols)
        high = finish(high, fault, bias, col + width, cols, HAS_BIAS)
        if by_tma:
            store_tma(high, out_desc, buffer, first_row, col + width)
        else:
            store_masked(high, out, first_row, row_limit, col + width, cols)
    else:
        done = finish(tile, fault, bias, col, cols, HAS_BIAS)
        if by_tma:
            store_tma(done, out_desc, buffer, first_row, col)
        else:
            store_masked(done, out, first_row, row_limit, col, cols)


@gluon.jit
def store_cut_tile(
    tile, fault, bias, out, partials, counters, number, first_row, row_limit, col, cols,
    num_whole, k_blocks, tail_span,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, WARPS: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Epilogue of a part: put it beside the others; who comes last sums them in program order and stores."""
    cut = number - num_whole
    first, last = part_range(number, num_whole, k_blocks, tail_span)
    store_part(tile, partials, part_place(gl.program_id(0), cut, k_blocks, tail_span), TILE_M, TILE_N)
    block_barrier()
    arrived = gl.atomic_add(counters + cut, 1, sem="acq_rel", scope="gpu")
    if arrived == last - first:
        block_barrier()
        gl.store(counters + cut, 0)
        width: gl.constexpr = 64 if TILE_N > 64 else TILE_N
        for piece in gl.static_range(TILE_N // width):
            offset = piece * width
            total = sum_parts(
                partials, first, last, cut, k_blocks, tail_span, offset, TILE_M, TILE_N, width, WARPS
            )
            total = finish(total, fault, bias, col + offset, cols, HAS_BIAS)
            store_masked(total, out, first_row, row_limit, col + offset, cols)


@gluon.jit
def multiply_partition(
    out, out_desc, out_buffer, bias, partials, counters, a_ring, b_ring, empty, ready, signals, control, report, trace,
    epoch, rank, rows, cols, num_tiles, num_whole, tail_span, tile_rows, tile_cols, k_blocks, max_units,
    WORLD_SIZE: gl.constexpr, NUM_SLICES: gl.constexpr, PUSH: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, HALVES: gl.constexpr, HAS_BIAS: gl.constexpr,
    OUT_TMA: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """The warpgroups: multiply each unit from the ring and store it; the program's last word to the epoch."""
    program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    whole, units = unit_count(program, num_programs, num_tiles, num_whole, k_blocks, tail_span)
    turn = 0
    for index in range(0, units):
        number, k_begin, k_end = unit_range(
            index, whole, program, num_programs, num_tiles, num_whole, k_blocks, tail_span
        )
        first_row, row_limit, col = place(number, rank, WORLD_SIZE, rows, TILE_M, tile_rows, tile_cols, GROUP_M)
        tile, turn, fault = multiply_tile(
            turn, k_end - k_begin, a_ring, b_ring, empty, ready, control, TILE_M, TILE_N, STAGES, WARPS
        )
        if k_end - k_begin == k_blocks:
            store_tile(
                tile, fault, bias, out, out_desc, out_buffer, first_row, row_limit, col * TILE_N, cols,
                rows * WORLD_SIZE, TILE_M, TILE_N, HALVES, HAS_BIAS, OUT_TMA,
            )  # fmt: skip
        else:
            store_cut_tile(
                tile, fault, bias, out, partials, counters, number, first_row, row_limit, col * TILE_N, cols,
                num_whole, k_blocks, tail_span, TILE_M, TILE_N, WARPS, HAS_BIAS,
            )  # fmt: skip
        stamp(trace, NUM_SLICES + program * max_units + index, 2, epoch, TRACE)
    tma.store_wait(0)
    if not PUSH:  # the copy engine reads the epoch word: it must have pushed before the word moves
        if program == num_programs - 1:
            wait(signals, WORLD_SIZE * MAX_SLICES + WORLD_SIZE, 1, epoch, -1, control, report, WARPS)
    leave(control, epoch, num_programs)


@gluon.jit
def move_partition(
    x, gathered, slots, slot_table, signal_table, signals, control, report, trace,
    epoch, slot, slot_size, rank, size, slice_size, share_size, num_producers,
    WORLD_SIZE: gl.constexpr, NUM_SLICES: gl.constexpr, PUSH: gl.constexpr, GATHERED: gl.constexpr,
    BLOCK: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """Two warps beside the matmul: push slices of the own shard and signal each; copy the gathered input out."""
    program = gl.program_id(0)
    slot_offset = slot.to(gl.int64) * slot_size  # here, since what crosses into a partition loses its known alignment
    if PUSH:
        if program < num_producers:
            for piece in range(program, NUM_SLICES, num_producers):
                stamp(trace, piece, 0, epoch, TRACE)
                push_slice(
                    x, slot_table, rank, slot_offset, size, piece * slice_size,
                    gl.minimum((piece + 1) * slice_size, size), WORLD_SIZE, BLOCK,
                )  # fmt: skip
                block_barrier()
                for i in gl.static_range(1, WORLD_SIZE):
                    notify(symm_at(signal_table, (rank + i) % WORLD_SIZE, gl.int32) + rank * MAX_SLICES + piece, epoch)
                stamp(trace, piece, 1, epoch, TRACE)
                label(trace, piece, epoch * 0 + piece, TRACE)
    if GATHERED:
        begin = program * share_size
        end = gl.minimum(begin + share_size, size)
        copy_flat(gathered + rank.to(gl.int64) * size, x, begin, end, BLOCK, MOVE_WARPS)
        for step in range(1, WORLD_SIZE):
            source = (rank + WORLD_SIZE - step) % WORLD_SIZE
            wait(signals, source * MAX_SLICES, NUM_SLICES, epoch, -1, control, report, MOVE_WARPS)
            remote = slots + slot_offset + (step - 1) * size.to(gl.int64)
            copy_flat(gathered + source.to(gl.int64) * size, remote, begin, end, BLOCK, MOVE_WARPS)


@gluon.jit
def push_slice(
    x, slot_table, rank, slot_offset, size, begin, end, WORLD_SIZE: gl.constexpr, BLOCK: gl.constexpr
):
    """Elements [begin, end) of the own shard to every peer, block by block, each block to all peers in turn."""
    layout: gl.constexpr = gl.BlockedLayout([BLOCK // (32 * MOVE_WARPS)], [32], [MOVE_WARPS], [0])
    for start in range(begin, end, BLOCK):
        index = start + gl.arange(0, BLOCK, layout=layout)
        mask = index < end
        value = gl.load(x + index, mask=mask)
        for i in gl.static_range(1, WORLD_SIZE):
            target = symm_at(slot_table, (rank + i) % WORLD_SIZE, x.dtype.element_ty)
            target = target + slot_offset + (i - 1) * size.to(gl.int64)
            gl.store(gl.multiple_of(target + index, [16]), value, mask=mask)


UNSPECIALIZED = [
    "rank", "slot", "num_producers", "num_tiles", "num_whole", "tail_span", "tile_rows", "tile_cols", "k_blocks", "max_units",
]  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def all_gather_matmul_hopper_kernel(
    x_desc, slot0_desc, slot1_desc, w_desc, out_desc, x, bias, out, gathered, slots, partials, counters,
    slot_table, signal_table, signals, control, report, trace,
    rank, slot, slot_size, rows, cols, size, slice_size, share_size, num_producers,
    num_tiles, num_whole, tail_span, tile_rows, tile_cols, k_blocks, max_units,
    WORLD_SIZE: gl.constexpr, NUM_SLICES: gl.constexpr, PUSH: gl.constexpr, BLOCK: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, BOX_M: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, HALVES: gl.constexpr, HAS_BIAS: gl.constexpr, GATHERED: gl.constexpr,
    OUT_TMA: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """Dispatch the partitions."""
    a_ring, b_ring, empty, ready = make_ring(x_desc, w_desc, TILE_M, TILE_K, STAGES)
    out_buffer = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
    epoch = gl.load(control, volatile=True)
    if PUSH:
        slot = epoch & 1
    if PUSH or GATHERED:
        gl.warp_specialize(
            [
                (multiply_partition, (
                    out, out_desc, out_buffer, bias, partials, counters, a_ring, b_ring, empty, ready, signals, control,
                    report, trace, epoch, rank, rows, cols, num_tiles, num_whole, tail_span, tile_rows, tile_cols,
                    k_blocks, max_units, WORLD_SIZE, NUM_SLICES, PUSH, TILE_M, TILE_N, GROUP_M, STAGES, WARPS, HALVES,
                    HAS_BIAS, OUT_TMA, TRACE,
                )),
                (load_partition, (
                    x_desc, slot0_desc, slot1_desc, w_desc, a_ring, b_ring, empty, ready, signals, control, report,
                    trace, epoch, slot, rank, rows, num_tiles, num_whole, tail_span, tile_rows, tile_cols, k_blocks,
                    max_units, WORLD_SIZE, NUM_SLICES, TILE_M, TILE_N, TILE_K, BOX_M, GROUP_M, STAGES, TRACE,
                )),
                (move_partition, (
                    x, gathered, slots, slot_table, signal_table, signals, control, report, trace, epoch,
                    slot, slot_size, rank, size, slice_size, share_size, num_producers,
                    WORLD_SIZE, NUM_SLICES, PUSH, GATHERED, BLOCK, TRACE,
                )),
            ],
            [1, MOVE_WARPS],
            [40, 48],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply_partition, (
                    out, out_desc, out_buffer, bias, partials, counters, a_ring, b_ring, empty, ready, signals, control,
                    report, trace, epoch, rank, rows, cols, num_tiles, num_whole, tail_span, tile_rows, tile_cols,
                    k_blocks, max_units, WORLD_SIZE, NUM_SLICES, PUSH, TILE_M, TILE_N, GROUP_M, STAGES, WARPS, HALVES,
                    HAS_BIAS, OUT_TMA, TRACE,
                )),
                (load_partition, (
                    x_desc, slot0_desc, slot1_desc, w_desc, a_ring, b_ring, empty, ready, signals, control, report,
                    trace, epoch, slot, rank, rows, num_tiles, num_whole, tail_span, tile_rows, tile_cols, k_blocks,
                    max_units, WORLD_SIZE, NUM_SLICES, TILE_M, TILE_N, TILE_K, BOX_M, GROUP_M, STAGES, TRACE,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip


def box_rows(rows: int, tile_m: int) -> int:
    """Rows that one TMA load takes: a whole tile, or what divides a shard where tiles span shards."""
    return tile_m if rows >= tile_m else min(rows & -rows, tile_m)


def fits(x: torch.Tensor, w: torch.Tensor, config: MatmulConfig) -> bool:
    """Whether TMA can read these tensors, and boxes are tall enough; if not, the Triton kernel runs in this one's place."""
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in (x, w))
    return aligned and box_rows(x.shape[0], config.tile_m) >= 8


def _descriptor(tensor: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), [rows, cols],
        gl.NVMMASharedLayout.get_default_for([rows, cols], dtype),
    )  # fmt: skip


def launch(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gathered: torch.Tensor | None,
    peers: Endpoint,
    schedule: TileSchedule,
    config: MatmulConfig,
    slot: int,
    trace: torch.Tensor | None = None,
) -> None:
    """Launch on the current stream; as ``all_gather_matmul.launch``, for what :func:`fits`."""
    push = config.transport == "sm"
    slices = config.num_slices if push else 1
    size, programs = x.numel(), schedule.num_programs
    box = box_rows(schedule.rows, config.tile_m)
    halves = 2 if config.tile_n == 256 else 1
    places = (schedule.world_size - 1) * schedule.rows
    slots = [
        _descriptor(peers.slots[i * peers.slot_size :][: places * schedule.depth].view(places, schedule.depth), box, config.tile_k)
        for i in (0, 1)
    ]
    out_tma = schedule.cols * x.element_size() % 16 == 0 and out.data_ptr() % 16 == 0
    out_desc = _descriptor(out if out_tma else x, config.tile_m, config.tile_n // halves)
    partials = out
    if schedule.num_whole < schedule.num_tiles:
        partials = torch.empty(2 * programs * config.tile_m * config.tile_n, dtype=torch.float32, device=x.device)
    warps = config.num_warps + 4  # load and move: three warps, allotted by fours
    all_gather_matmul_hopper_kernel[(programs,)](
        _descriptor(x, box, config.tile_k), *slots, _descriptor(w, config.tile_n, config.tile_k), out_desc,
        x, out if bias is None else bias, out, out if gathered is None else gathered, peers.slots, partials,
        peers.counters, peers.slot_table, peers.signal_table, peers.signals, peers.control, peers.report,
        peers.control if trace is None else trace,
        schedule.rank, slot, peers.slot_size, schedule.rows, schedule.cols, size,
        slice_bounds(size, slices, 0, MOVE_BLOCK)[1], slice_bounds(size, programs, 0, MOVE_BLOCK)[1],
        min(config.num_producers, programs), schedule.num_tiles, schedule.num_whole, schedule.tail_span,
        schedule.tile_rows, schedule.tile_cols, schedule.k_blocks, schedule.max_units(),
        WORLD_SIZE=schedule.world_size, NUM_SLICES=slices, PUSH=push, BLOCK=MOVE_BLOCK,
        TILE_M=config.tile_m, TILE_N=config.tile_n, TILE_K=config.tile_k, BOX_M=box, GROUP_M=config.group_m,
        STAGES=config.num_stages, WARPS=config.num_warps, HALVES=halves, HAS_BIAS=bias is not None,
        GATHERED=gathered is not None, OUT_TMA=out_tma, TRACE=trace is not None,
        num_warps=config.num_warps, maxnreg=min(65536 // (warps * 32) // 8 * 8, 248),
    )  # fmt: skip
