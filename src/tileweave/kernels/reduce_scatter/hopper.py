"""The Hopper kernel of ``matmul_reduce_scatter``: the same protocol and schedule as in Triton,
warp-specialised in Gluon.

Read ``kernels/reduce_scatter/triton.py`` first: equation, signals, timeline and proof are there and
hold here. What differs:

- Three partitions: *load* feeds TMA, *multiply* runs wgmma and the epilogue in pieces of 64
  columns, *store* takes pieces from shared memory to memory, drains and counts them, concurrently
  with the other two.
- ``"copy_engine"``: what copy engines brought for an own tile comes through the same ring as its
  operands: after the last K block *load* waits for the chunk of one peer after the other and asks
  for its pieces, *multiply* adds them as they come. So the wait and the way from memory are hidden
  as those of operands are, and after the last peer's signal only that peer's part is left to add.
  Ranks meet in *store*.
- ``"sm"``: *multiply* pushes registers and polls for registers, and *store* has nothing to do.
- FP8 operands (``SCALED``): the same ring, of tiles with twice the elements along K; what peers
  sent comes through it as 16-bit numbers all the same (``piece_buffer``). Scales of rows multiply a
  partial sum in the epilogue, after helpers' parts and before it is rounded or added to others.
  Those of blocks are applied after each 128 of K, and so are sums in fp32 (``multiply_promoted``,
  ``multiply_in_quarters``) unless tensor cores may keep them.
- ``EXCHANGE`` and ``WHOLE``: see :class:`Choices`.

Limits: 2 bytes per element, or 1 of FP8 with w along K; rows of x and w (or columns of w,
``DEPTH_FIRST``) at multiples of 16 bytes; ``"copy_engine"``: ``tile_k`` 64, as many as a piece has
columns, or 128 of FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tileweave.device.gluon import signal
from tileweave.device.gluon.matmul import (
    Helped,
    await_parts,
    claim,
    give_part,
    give_pieces,
    load_slot,
    load_weight,
    make_ring,
    multiply_in_quarters,
    multiply_promoted,
    multiply_tile,
    part_range,
    place_out,
    share_of,
    unit_range,
)
from tileweave.device.gluon.peers import leave, load_epoch
from tileweave.device.gluon.signal import acquire, load_async
from tileweave.device.triton.tiles import OwnerTiles
from tileweave.kernels.reduce_scatter.hopper_epilogue import (
    BOXES,
    MAX_SLICES,
    PIECE,
    Boxes,
    Scales,
    Sizes,
    Spot,
    add_arrived,
    block_scales,
    finish_part,
    finish_piece,
    load_scales,
    piece_buffer,
    pieces_of,
    store_partition,
    take_gathered,
    tile_place,
)
from tileweave.kernels.reduce_scatter.triton import scheduled
from tileweave.kernels.runtime.descriptors import based, descriptor, weight
from tileweave.kernels.runtime.launch import Call, Launcher, alignment
from tileweave.kernels.runtime.peers import Peers, lines, memory_of_parts
from tileweave.kernels.scaling import Scales as GivenScales
from tileweave.kernels.scaling import Scaling
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.scatter import ScatterSchedule


class Operands(NamedTuple):
    """Descriptors that *load* reads through: x, w, what copy engines brought to either slot, and
    what is added to own tiles."""

    x: Any
    w: Any
    slot0: Any
    slot1: Any
    residual: Any


class Tensors(NamedTuple):
    """Tensors of a call that are not read through a descriptor; ``bias``, ``partials`` and
    ``scales``, those of x and w, are any tensors where there are none."""

    bias: Any
    out: Any
    partials: Any
    scales: Any


class Choices(NamedTuple):
    """Decided when the kernel is compiled.

    PUSH : the transport is ``"sm"``: *multiply* stores partial sums in the slots of peers.
        Otherwise *store* stores them in ``staging``, and copy engines copy them.

    SPANS : a tile is taller than a shard, so that its rows have several owners. Only with ``PUSH``.

    SPLIT_TAIL : tiles that do not fill a last wave are cut along K.

    EXCHANGE : the kernel is ``matmul_all_to_all``, whose protocol it follows
        (``kernels/all_to_all/scatter_triton.py``), and nothing is added. ``rows`` are those of a
        part, padded to whole tiles, and ``staging`` is a slot of this rank. *store* announces
        chunks to their owners, which pull them, and the last program ends the call.

    DEPTH_FIRST : ``w`` is contiguous along N.

    WHOLE : TMA stores own tiles. Otherwise, since rows of ``out`` are not at multiples of 16 bytes,
        *multiply* stores them.

    HAS_RESIDUAL : a residual of the own rows is added, as what a peer sends. Not with ``PUSH``.

    GATHER : as in ``triton.py``. Only with ``WHOLE``.

    ITEMSIZE : bytes of an element of x and w.

    SCALED, X_STEP, W_STEP, PROMOTE : as in ``triton.py``.
    """

    WORLD_SIZE: int
    PUSH: bool
    SPANS: bool
    SPLIT_TAIL: bool
    TILE_M: int
    TILE_N: int
    TILE_K: int
    GROUP_M: int
    STAGES: int
    WARPS: int
    EXCHANGE: bool
    DEPTH_FIRST: bool
    WHOLE: bool
    HAS_BIAS: bool = False
    HAS_RESIDUAL: bool = False
    GATHER: bool = False
    ITEMSIZE: int = 2
    SCALED: int = 0
    X_STEP: int = 1
    W_STEP: int = 1
    PROMOTE: bool = False


@gluon.jit
def load_partition(operands, ring, peers, slot, tiles, sizes, num_partitions, C: gl.constexpr):
    """One warp: keep the ring full, with operands, then with the peers' pieces of own tiles."""
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    TILE_K: gl.constexpr = C.TILE_K
    STAGES: gl.constexpr = C.STAGES
    block_bytes: gl.constexpr = (TILE_M + TILE_N) * TILE_K * C.ITEMSIZE
    program = gl.program_id(0)
    rank, rows = tiles.rank, tiles.rows
    epoch = load_epoch(peers)
    turn = 0
    arrived = 0  # bit c: chunk c of own tiles is there from all peers
    share = share_of(tiles, program, gl.num_programs(0), tiles.num_tiles)
    for index in range(0, share.units):
        tile, k_begin, k_end = unit_range(share, index)
        first_row, row_limit, col = place_out(tiles, tile)
        x_row, w_row = first_row, col * TILE_N
        if C.EXCHANGE:
            home = first_row // rows
            x_row = first_row - home * rows + home * sizes.x_step
            w_row = home * sizes.w_step + col * TILE_N
        for block in range(k_begin, k_end):
            at = claim(ring, turn, block_bytes, STAGES)
            ready, k = ring.ready.index(at), block * TILE_K
            load_weight(operands.w, w_row, k, ready, ring.b.index(at), C.DEPTH_FIRST)
            load_async(operands.x, [x_row, k], ready, ring.a.index(at))
            turn += 1
        if not C.PUSH and not C.EXCHANGE:
            owner, helpers = part_range(share, tile)
            if (program == owner) & (first_row // rows == rank):
                row = first_row - rank * rows
                chunk = row // TILE_M // tiles.chunk_rows
                if C.HAS_RESIDUAL:
                    for piece in gl.static_range(TILE_N // PIECE):
                        at = claim(ring, turn, TILE_M * PIECE * 2, STAGES)
                        piece_col = col * TILE_N + piece * PIECE
                        load_async(
                            operands.residual,
                            [row, piece_col],
                            ring.ready.index(at),
                            piece_buffer(ring, at, operands.residual.dtype, C),
                        )
                        turn += 1
                for step in gl.static_range(1, WORLD_SIZE):  # in order of arrival
                    source = (rank + WORLD_SIZE - step) % WORLD_SIZE
                    if ((arrived >> chunk) & 1) == 0:
                        signal.spin(
                            peers.signals + chunk,
                            source,
                            source,
                            MAX_SLICES,
                            epoch,
                            tile,
                            peers.control,
                            peers.report,
                            1,
                            1,
                            1,
                            EXACT=True,
                        )
                        acquire(epoch)
                    place = source - (source > rank).to(gl.int32)
                    for piece in gl.static_range(TILE_N // PIECE):
                        at = claim(ring, turn, TILE_M * PIECE * 2, STAGES)
                        load_slot(
                            operands.slot0,
                            operands.slot1,
                            slot,
                            place * tiles.tile_rows * TILE_M + row,
                            col * TILE_N + piece * PIECE,
                            ring.ready.index(at),
                            piece_buffer(ring, at, operands.slot0.dtype, C),
                        )
                        turn += 1
                arrived = arrived | (1 << chunk)
    leave(peers, epoch, num_partitions)


@gluon.jit
def multiply_partition(
    tensors,
    scales,
    peers,
    ring,
    boxes,
    slot,
    tiles,
    sizes,
    part_rows,
    num_chunks,
    num_partitions,
    C: gl.constexpr,
):
    """The warpgroups: multiply each unit from the ring; send it, add what peers sent, or hand it to
    the tile's owner."""
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    TILE_M: gl.constexpr = C.TILE_M
    TILE_N: gl.constexpr = C.TILE_N
    partials, counters = tensors.partials, peers.counters
    program = gl.program_id(0)
    epoch = load_epoch(peers)
    if C.PUSH:
        slot = epoch & 1
    slot_offset = slot.to(gl.int64) * peers.slot_size
    turn = 0
    sent = 0
    share = share_of(tiles, program, gl.num_programs(0), tiles.num_tiles)
    for index in range(0, share.units):
        tile, k_begin, k_end = unit_range(share, index)
        first_row, row_limit, tile_col = place_out(tiles, tile)
        of_rows = first_row
        if C.SCALED:
            row_limit = gl.minimum(row_limit, sizes.height)
        if C.SCALED == 1:
            of_rows, of_cols = load_scales(
                scales, first_row, row_limit, tile_col * TILE_N, sizes.cols, C
            )
        IN_QUARTERS: gl.constexpr = C.PROMOTE and TILE_N == 256
        if IN_QUARTERS:
            quarters, turn = multiply_in_quarters(
                turn,
                k_begin,
                k_end - k_begin,
                ring,
                block_scales(scales, tiles, sizes.height, first_row, row_limit, tile_col * TILE_N),
                block_scales(
                    scales, tiles, sizes.height, first_row, row_limit, tile_col * TILE_N + 128
                ),
                TILE_M,
                C.STAGES,
                C.WARPS,
                C.SCALED == 2,
            )
        elif C.PROMOTE:
            acc, turn = multiply_promoted(
                turn,
                k_begin,
                k_end - k_begin,
                ring,
                block_scales(scales, tiles, sizes.height, first_row, row_limit, tile_col * TILE_N),
                TILE_M,
                TILE_N,
                C.STAGES,
                C.WARPS,
                C.SCALED == 2,
            )
        else:
            acc, turn, fault = multiply_tile(
                turn,
                k_end - k_begin,
                ring,
                peers.control,
                TILE_M,
                TILE_N,
                C.STAGES,
                C.WARPS,
                DEPTH_FIRST=C.DEPTH_FIRST,
            )
        owner, helpers = part_range(share, tile)
        if program != owner:
            if IN_QUARTERS:
                give_pieces(quarters, partials, counters, 0, share, tile, TILE_M, TILE_N)
            else:
                give_part(acc, partials, counters, 0, share, tile, TILE_M, TILE_N)
        else:
            if helpers > 0:
                await_parts(counters, 0, share, tile, helpers)
            home = first_row // tiles.rows
            at = tile_place(first_row, home, tiles, tile_col, TILE_N, C.SPANS)
            spot = Spot(tile, at, first_row, row_limit, tile_col * TILE_N, home, of_rows)
            if C.SCALED == 1:
                scales.cols.store(of_cols)
            if IN_QUARTERS:
                pieces = quarters
            else:
                pieces = pieces_of(acc, TILE_N)
            parts = helpers
            if not C.PUSH and not C.EXCHANGE:
                ADDED: gl.constexpr = WORLD_SIZE if C.HAS_RESIDUAL else WORLD_SIZE - 1
                num_peers = (home == tiles.rank).to(gl.int32) * ADDED
                helped = Helped(partials, program, helpers, share.team)
                pieces, turn = add_arrived(
                    pieces, turn, num_peers, ring, helped, spot, tensors.out, scales, C
                )
                parts = helpers * 0  # they were added; a number, as ``helpers`` is
            rest = Helped(partials, program, parts, share.team)
            for i in gl.static_range(TILE_N // PIECE):
                if C.EXCHANGE:
                    sent = finish_part(
                        pieces[i],
                        i * PIECE,
                        sent,
                        spot,
                        rest,
                        tensors,
                        boxes,
                        peers,
                        slot_offset,
                        tiles,
                        sizes,
                        part_rows,
                        epoch,
                        C,
                    )
                else:
                    sent = finish_piece(
                        pieces[i],
                        i * PIECE,
                        sent,
                        spot,
                        rest,
                        tensors,
                        scales,
                        boxes,
                        peers,
                        slot_offset,
                        tiles,
                        sizes,
                        epoch,
                        C,
                    )
    if C.GATHER:
        take_gathered(tensors.out, peers, slot_offset, tiles, sizes, num_chunks, epoch, C)
    leave(peers, epoch, num_partitions)


UNSPECIALIZED = [
    "rank",
    "slot",
    "rows",
    "chunk_rows",
    "team",
    "tile_rows",
    "tile_cols",
]


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def matmul_reduce_scatter_hopper_kernel(
    x_desc,
    w_desc,
    slot0_desc,
    slot1_desc,
    out_desc,
    staging_desc,
    mirror1_desc,
    mirror2_desc,
    mirror3_desc,
    mirror4_desc,
    mirror5_desc,
    mirror6_desc,
    mirror7_desc,
    residual_desc,
    tensors,
    peers,
    rank,
    slot,
    sizes,
    rows,
    chunk_rows,
    team,
    tile_rows,
    tile_cols,
    C: gl.constexpr,
):
    """Make shared memory, then run the partitions; *store* ends at once where registers go directly
    to peers.

    ``rows``: of an owner, or of a part of an exchange. Others: as in Triton.
    """
    WORLD_SIZE: gl.constexpr = C.WORLD_SIZE
    TILE_M: gl.constexpr = C.TILE_M
    ring = make_ring(x_desc, w_desc, TILE_M, C.TILE_K, C.STAGES)
    NUM_BOXES: gl.constexpr = 1 if C.PUSH else BOXES
    BOX_ROWS: gl.constexpr = 8 if C.PUSH else TILE_M  # a push needs none
    box_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [BOX_ROWS, PIECE], out_desc.dtype
    )
    pieces = gl.allocate_shared_memory(out_desc.dtype, [NUM_BOXES, BOX_ROWS, PIECE], box_layout)
    free = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
    boxes = Boxes(pieces, free, full)
    # The compiler gives the memory of unused barriers to sums, and a sum may be kept where these
    # barriers are initialised: decision 0036.
    if not C.PUSH:
        for i in gl.static_range(BOXES):
            mbarrier.init(free.index(i), count=1)
            mbarrier.init(full.index(i), count=1)
    num_chunks = gl.cdiv(tile_rows, chunk_rows)
    owned = tile_rows * TILE_M if C.EXCHANGE else rows  # parts are padded to whole tiles
    scales = tensors.scales
    if C.SCALED == 1:
        of_cols: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        cols = gl.allocate_shared_memory(gl.float32, [C.TILE_N], of_cols)
        scales = Scales(scales.x, scales.w, cols)
    num_partitions = gl.num_programs(0) * 3
    mirrors = (mirror1_desc, mirror2_desc, mirror3_desc, mirror4_desc)
    mirrors = mirrors + (mirror5_desc, mirror6_desc, mirror7_desc)
    operands = Operands(x_desc, w_desc, slot0_desc, slot1_desc, residual_desc)
    tiles = OwnerTiles(
        rank,
        WORLD_SIZE,
        owned,
        TILE_M,
        C.GROUP_M,
        tile_rows * tile_cols * (1 if C.SPANS else WORLD_SIZE),
        chunk_rows,
        team,
        tile_rows,
        tile_cols,
        gl.cdiv(x_desc.shape[1], C.TILE_K),
        C.SPLIT_TAIL,
    )
    gl.warp_specialize(
        [
            (
                multiply_partition,
                (
                    tensors,
                    scales,
                    peers,
                    ring,
                    boxes,
                    slot,
                    tiles,
                    sizes,
                    rows,
                    num_chunks,
                    num_partitions,
                    C,
                ),
            ),
            (load_partition, (operands, ring, peers, slot, tiles, sizes, num_partitions, C)),
            (
                store_partition,
                (
                    tensors,
                    out_desc,
                    staging_desc,
                    mirrors,
                    boxes,
                    peers,
                    slot,
                    tiles,
                    num_chunks,
                    sizes,
                    num_partitions,
                    C,
                ),
            ),
        ],
        [1, 1],
        [40, 40],
    )


# What changes between the launches of one shape: words, and the bases of descriptors.
WORDS = ("tensors.bias", "tensors.out", "tensors.partials", "slot")
SCALED_WORDS = (*WORDS[:-1], "tensors.scales.x", "tensors.scales.w", "slot")
MAPS = ("x_desc", "w_desc", "out_desc", "staging_desc")
MIRRORS = tuple(f"mirror{step}_desc" for step in range(1, 8))


def choices_of(s: ScatterSchedule, c: MatmulConfig, strides_w: Sequence[int]) -> Choices:
    """Choices of a reduce-scatter without bias, of which TMA stores own tiles."""
    return Choices(
        WORLD_SIZE=s.world_size,
        PUSH=c.transport == "sm",
        SPANS=s.spans_shards,
        SPLIT_TAIL=s.split_tail,
        TILE_M=c.tile_m,
        TILE_N=c.tile_n,
        TILE_K=c.tile_k,
        GROUP_M=c.group_m,
        STAGES=c.num_stages,
        WARPS=c.num_warps,
        EXCHANGE=False,
        DEPTH_FIRST=lines(strides_w)[1],
        WHOLE=True,
    )


def launcher(
    peers: Peers,
    schedule: ScatterSchedule,
    config: MatmulConfig,
    dtype: torch.dtype,
    stride_x: int,
    strides_w: Sequence[int],
    whole: bool,
    residual_added: bool = False,
    scaling: Scaling | None = None,
    gathered: int = 0,
) -> Launcher:
    """Launches for one shape, called as those of ``triton.launcher``, of what ``descriptors.fits``.
    ``whole``: whether TMA can store ``out``; needed for ``gathered``, which is as there, as is
    ``scaling``. ``residual_added``: whether an all-reduce by tiles has a residual."""
    s, c = schedule, config
    push = c.transport == "sm"
    whole = whole or push  # a push has no use for it
    more = {"WHOLE": whole, "ITEMSIZE": dtype.itemsize, "GATHER": gathered > 0}
    choices = choices_of(s, c, strides_w)._replace(**more)
    made = dtype  # of the result, and of partial sums as they are sent
    if scaling is not None:
        choices, made = choices._replace(**scaling.choices(c)), scaling.out_dtype
    base, slot_bytes = peers.slots.data_ptr(), peers.slot_size * made.itemsize
    box = [c.tile_m, PIECE.value]
    shape = [(s.world_size - 1) * s.tile_rows * c.tile_m, s.cols]
    unused = descriptor(base, made, [64, 64], 64, box)
    height = gathered or s.world_size * s.rows
    own_rows = min(s.rows, height - s.rank * s.rows)  # the last rank may have fewer
    x_desc = descriptor(base, dtype, [height, s.depth], stride_x, [c.tile_m, c.tile_k])
    w_desc = weight(base, dtype, s.cols, s.depth, strides_w, [c.tile_n, c.tile_k])
    slot0_desc = slot1_desc = out_desc = staging_desc = unused
    if not push:
        slot0_desc = staging_desc = descriptor(base, made, shape, s.pitch, box)
        slot1_desc = descriptor(base + slot_bytes, made, shape, s.pitch, box)
        if whole:
            out_desc = descriptor(base, made, [own_rows, s.cols], s.cols, box)
    further = MIRRORS[: (s.world_size - 1) * choices.GATHER] + ("residual_desc",) * residual_added
    maps = (*MAPS, *further)
    descriptors = (x_desc, w_desc, out_desc, staging_desc, *(out_desc for _ in further))
    part_elements = s.part_elements

    def pack(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        staging: torch.Tensor | None,
        slot: int,
        mirrors: Sequence[int] = (),
        residual: torch.Tensor | None = None,
        scales: Sequence[torch.Tensor] = (),
        summed_in: torch.Tensor | None = None,
    ) -> Call:
        partials = memory_of_parts(summed_in, part_elements, out)
        added, to = out if bias is None else bias, out.data_ptr()
        bias_at = added.data_ptr()
        stored = base if push or not whole else to
        staged = base if staging is None else staging.data_ptr()
        bases = (x.data_ptr(), w.data_ptr(), stored, staged)
        if further:
            of_residual = () if residual is None else (residual.data_ptr(),)
            bases = (*bases, *mirrors, *of_residual)

        def changing() -> dict[str, Any]:
            return {
                **dict(zip(maps, based(descriptors, bases), strict=True)),
                "tensors": Tensors(added, out, partials, GivenScales(*(scales or (out, out)))),
                "slot": slot,
                "C": choices._replace(HAS_BIAS=bias is not None, HAS_RESIDUAL=residual_added),
            }

        ends = [scale.data_ptr() for scale in scales] if scales else ()
        aligned = alignment(ends) if ends else True
        variant = (to % 16 == 0, bias_at % 16 == 0, bias is None, aligned)
        return variant, (bias_at, to, partials.data_ptr(), *ends, slot), changing, bases

    fixed = {
        "slot0_desc": slot0_desc,
        "slot1_desc": slot1_desc,
        **dict.fromkeys(MIRRORS, unused),
        "residual_desc": unused,
        "peers": peers,
        "sizes": Sizes(s.place_elements, s.cols, height),
        "rows": s.rows,
        **scheduled(s),
    }
    # 12 warps share the registers, or 8: 8 or 4, + 1 + 1, rounded up to whole warpgroups
    return Launcher(
        matmul_reduce_scatter_hopper_kernel,
        s.num_programs,
        fixed,
        pack,
        WORDS if scaling is None else SCALED_WORDS,
        maps,
        num_warps=c.num_warps,
        maxnreg=168,
    )
