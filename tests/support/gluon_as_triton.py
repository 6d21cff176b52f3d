"""What the Hopper kernel of ``grouped_matmul_combine`` adds and sends, interpreted: its Gluon
source read as Triton.

Gluon has no interpreter. But ``kernels/experts/combine_hopper_tasks.py`` computes with what both
languages have: layouts aside, and with Triton's words for waits and signals, it is Triton. So here
every rank is one program that multiplies (the Triton kernel's role), lists rows and then serves all
tickets, over lists that begin as garbage. Where programs run beside each other, as in
``tests/explore``, there are two for each multiprocessor: *reduce* lists rows and serves early
tickets, *multiply* has the tiles and serves early and late ones. What a layout must be, only a GPU
shows.
"""

from __future__ import annotations

import ast
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
import triton.language as tl
from tests.support import combine as combining
from tests.support.experts import Case
from tests.support.worlds import Member

from tileweave.device.triton.signal import MAX_SLICES, leave, load_epoch, wait
from tileweave.kernels.experts import combine_hopper_tasks as gluon_tasks
from tileweave.kernels.experts import combine_triton as plain
from tileweave.kernels.experts.combine_triton import multiply_role
from tileweave.planning.combine import CombineConfig, CombineCut, partial_bytes

WORDS = """
import triton
import triton.language as tl
from tileweave.kernels.experts import combine_hopper_tickets as combine_tickets
from tileweave.device.triton import remote
from tileweave.device.triton import signal
from tileweave.device.triton.signal import FAULT, MAX_SLICES, notify


@triton.jit
def block_barrier():
    tl.debug_barrier()


@triton.jit
def acquire(epoch):
    tl.debug_barrier()


@triton.jit
def symm_at(table, peer, dtype: tl.constexpr):
    return remote.symm_at(table, peer, dtype, 16)


@triton.jit
def notify_all(table, offset, rank, epoch, WORLD_SIZE: tl.constexpr, OWN: tl.constexpr, WARPS: tl.constexpr):
    signal.notify_all(table, offset, rank, epoch, WORLD_SIZE, OWN)


@triton.jit
def spin(
    signals, first, last, stride, epoch, unit, control, report, COUNT: tl.constexpr, SPREAD: tl.constexpr, WARPS: tl.constexpr
):
    for source in range(first, last + 1):
        signal.wait(signals, 1, epoch, source * stride, unit, control, report)
"""


class _ToTriton(ast.NodeTransformer):
    """Layouts are left out; every other Gluon word has the same meaning in Triton."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name({"gl": "tl", "gluon": "triton"}.get(node.id, node.id), node.ctx)

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> ast.AST:
        if ast.unparse(node.value or node).startswith("gl.BlockedLayout(") or (
            isinstance(node.value, ast.Attribute) and node.value.attr == "layout"
        ):
            node.value = ast.Constant(0)
        return self.generic_visit(node)

    visit_AnnAssign = visit_Assign  # noqa: N815

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "layout"]
        if ast.unparse(node.func) == "gl.zeros":
            node.args = node.args[:2]
        return self.generic_visit(node)


def as_triton(source: str) -> str:
    """``source``, of a file of Gluon functions, as Triton."""
    module = _ToTriton().visit(ast.parse(source))
    module.body = module.body[1:]  # the docstring
    text = ast.unparse(ast.fix_missing_locations(module))
    assert "gl." not in text.replace("tl.", "") and "Layout(" not in text, (
        "a Gluon word that is not translated"
    )
    return f"from __future__ import annotations\n{WORDS}\n{text}\n"


def load_tasks(folder: str) -> Any:
    """The Hopper kernel's tasks as a module of Triton functions."""
    path = Path(folder) / "combine_tasks_as_triton.py"
    path.write_text(as_triton(Path(str(gluon_tasks.__file__)).read_text()))
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_FOLDER = TemporaryDirectory()
_tasks = load_tasks(_FOLDER.name)
clear_other_counts, push_weights, list_rows = (
    _tasks.clear_other_counts,
    _tasks.push_weights,
    _tasks.list_rows,
)
serve_tickets, COUNTER_WORDS = _tasks.serve_tickets, _tasks.COUNTER_WORDS


@triton.jit
def twin_kernel(
    y,
    w,
    offsets,
    entry_row,
    topk_ids,
    weights,
    products,
    out,
    rows,
    factors,
    lengths,
    slots,
    counters,
    slot_table,
    signal_table,
    signals,
    control,
    report,
    rank,
    slot_size,
    weights_base,
    weights_slot,
    tokens,
    max_tokens,
    experts,
    cols,
    depth,
    stride_y,
    stride_e,
    stride_w,
    chunks,
    chunk_cols,
    groups,
    group_blocks,
    blocks,
    WORLD_SIZE: tl.constexpr,
    TOPK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    DEPTH_FIRST: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
    WARPS: tl.constexpr,
    PARTITIONS: tl.constexpr,
):
    """A rank's one program: all roles, one after another. ``PARTITIONS`` 2: *reduce* and *multiply*
    are two programs."""
    partition = tl.program_id(0) % PARTITIONS
    program = tl.program_id(0) // PARTITIONS
    programs = tl.num_programs(0) // PARTITIONS
    epoch = load_epoch(control)
    parity = epoch & 1
    slot_offset = parity.to(tl.int64) * slot_size
    weights_offset = weights_base + parity.to(tl.int64) * weights_slot
    counts = counters + parity * COUNTER_WORDS
    if partition == 0:
        if program == 0:
            clear_other_counts(counters, parity, WARPS)
        if WEIGHTED:
            push_weights(
                weights,
                counts,
                slot_table,
                signal_table,
                weights_offset,
                rank,
                tokens * TOPK,
                max_tokens * TOPK,
                epoch,
                program,
                programs,
                WORLD_SIZE,
                WARPS,
            )
        list_rows(
            entry_row,
            topk_ids,
            rows,
            factors,
            lengths,
            counts,
            slot_table,
            signals,
            control,
            report,
            weights_offset,
            rank,
            experts,
            tokens,
            max_tokens,
            epoch,
            program,
            programs,
            WORLD_SIZE,
            TOPK,
            WEIGHTED,
            WARPS,
        )
        if PARTITIONS == 2:
            serve_tickets(
                products,
                rows,
                factors,
                lengths,
                offsets,
                out,
                counts,
                slots,
                slot_table,
                signal_table,
                signals,
                control,
                report,
                slot_offset,
                rank,
                epoch,
                experts,
                cols,
                chunks,
                chunk_cols,
                tokens,
                max_tokens,
                groups,
                group_blocks,
                blocks,
                programs,
                WORLD_SIZE,
                TOPK,
                WEIGHTED,
                EXPERTS,
                TILE_M,
                TILE_N,
                TOKENS,
                COLS,
                WARPS,
                1,
            )
    if partition == PARTITIONS - 1:
        multiply_role(
            y,
            w,
            offsets,
            products,
            counts,
            program,
            programs,
            experts,
            cols,
            depth,
            chunks,
            chunk_cols,
            stride_y,
            stride_e,
            stride_w,
            TILE_M,
            TILE_N,
            TILE_K,
            GROUP_M,
            EVEN_K,
            DEPTH_FIRST,
        )
        serve_tickets(
            products,
            rows,
            factors,
            lengths,
            offsets,
            out,
            counts,
            slots,
            slot_table,
            signal_table,
            signals,
            control,
            report,
            slot_offset,
            rank,
            epoch,
            experts,
            cols,
            chunks,
            chunk_cols,
            tokens,
            max_tokens,
            groups,
            group_blocks,
            blocks,
            programs,
            WORLD_SIZE,
            TOPK,
            WEIGHTED,
            EXPERTS,
            TILE_M,
            TILE_N,
            TOKENS,
            COLS,
            WARPS,
            2,
        )
    if (partition == 0) & (program == programs - 1):
        for step in tl.static_range(1, WORLD_SIZE):  # also where this rank has no tokens
            word = (rank + step) % WORLD_SIZE * MAX_SLICES + chunks * groups
            wait(signals, 1, epoch, word, -1, control, report)
    leave(control, epoch, tl.num_programs(0))


def launch(
    peers,
    y,
    experts,
    offsets,
    entry_row,
    topk_ids,
    weights,
    products,
    out,
    shape,
    config,
    rank,
    num_sms,
) -> None:
    """As ``grouped_matmul_combine.launch``, one program a rank; with ``num_reduce`` = 0 two for
    each multiprocessor."""
    s, c, cut = shape, config, CombineCut.of(shape, config)
    depth_first = experts.stride(2) != 1
    slot_bytes = peers.slot_size * out.element_size()
    entries = s.world_size * s.max_tokens
    # NaN as a weight
    garbage = torch.full((entries * (2 * s.topk + 1),), 0x7FC00001, dtype=torch.int32)
    rows, factors, lengths = garbage.split([entries * s.topk, entries * s.topk, entries])
    products.fill_(float("nan"))
    partitions = 2 if c.num_reduce == 0 else 1
    twin_kernel[(2 * num_sms if partitions == 2 else 1,)](
        y,
        experts,
        offsets,
        entry_row,
        topk_ids,
        offsets if weights is None else weights,
        products,
        out,
        rows,
        factors.view(torch.float32),
        lengths,
        peers.slots,
        peers.counters,
        peers.slot_table,
        peers.signal_table,
        peers.signals,
        peers.control,
        peers.report,
        rank,
        peers.slot_size,
        partial_bytes(s) // 4,
        slot_bytes // 4,
        out.shape[0],
        s.max_tokens,
        s.experts,
        s.cols,
        s.depth,
        y.stride(0),
        experts.stride(0),
        experts.stride(2) if depth_first else experts.stride(1),
        cut.chunks,
        cut.chunk_cols,
        cut.groups,
        cut.group_blocks,
        cut.blocks,
        WORLD_SIZE=s.world_size,
        TOPK=s.topk,
        WEIGHTED=weights is not None,
        EXPERTS=triton.next_power_of_2(s.experts),
        TILE_M=c.tile_m,
        TILE_N=c.tile_n,
        TILE_K=c.tile_k,
        GROUP_M=c.group_m,
        EVEN_K=s.depth % c.tile_k == 0,
        DEPTH_FIRST=depth_first,
        TOKENS=c.block_tokens,
        COLS=c.block_cols,
        WARPS=c.num_warps,
        PARTITIONS=partitions,
    )


def parity(
    me: Member, cases: list[Case], configs: list[CombineConfig], weighted: bool = True
) -> None:
    """``combining.parity`` of the twin; ``num_warps``: those of the partition that serves
    tickets."""
    theirs, plain.launch = plain.launch, launch
    try:
        for config in configs:
            combining.parity(me, cases, config, False, weighted)
    finally:
        plain.launch = theirs
