"""Interpret the sums and pushes of the Hopper kernel of ``grouped_matmul_combine``: its Gluon
source, translated to Triton.

Gluon has no interpreter. But ``kernels/experts/combine_hopper_tasks.py`` computes with operations
that both languages have: without layouts, and with Triton's functions for waits and signals, it is
Triton.

Here each rank is one program. It multiplies (the role of the Triton kernel), lists rows and then
serves all tickets, from lists that are uninitialized at first. Where programs run concurrently, as
in ``tests/explore``, there are two per multiprocessor: *reduce* lists rows and serves early
tickets, *multiply* computes the tiles and serves early and late tickets. Layouts can only be
checked on a GPU.
"""

from __future__ import annotations

import ast
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from tests.support import combine
from tests.support.experts import Case
from tests.support.worlds import Member

from tileweave.device.triton.peers import leave, load_epoch, wait
from tileweave.device.triton.signal import MAX_SLICES
from tileweave.kernels.experts import combine_hopper_tasks as gluon_tasks
from tileweave.kernels.experts import combine_triton as plain
from tileweave.kernels.experts.combine_triton import multiply_role
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.combine import CombineConfig, CombineCut
from tileweave.planning.schedules.grouped import GroupedProblem

WORDS = """
from typing import Any, NamedTuple

import triton
import triton.language as tl
from tileweave.kernels.experts import combine_hopper_tickets as combine_tickets
from tileweave.kernels.experts import combine_layout
from tileweave.kernels.experts.combine_layout import (
    COUNTER_WORDS, DRAWN, LISTED, SENT, TICKETS, TILES, WEIGHTS
)
from tileweave.device.triton import peers as protocol
from tileweave.device.triton import signal
from tileweave.device.triton.peers import faulted, signals_at, slots_at
from tileweave.device.triton.signal import MAX_SLICES, notify


@triton.jit
def block_barrier():
    tl.debug_barrier()


@triton.jit
def acquire(epoch):
    tl.debug_barrier()


@triton.jit
def notify_all(
    peers, index, rank, epoch, WORLD_SIZE: tl.constexpr, OWN: tl.constexpr, WARPS: tl.constexpr
):
    protocol.notify_all(peers, index, rank, epoch, WORLD_SIZE, OWN)


@triton.jit
def spin(
    signals,
    first,
    last,
    stride,
    epoch,
    unit,
    control,
    report,
    COUNT: tl.constexpr,
    SPREAD: tl.constexpr,
    WARPS: tl.constexpr,
):
    for source in range(first, last + 1):
        signal.wait(signals, 1, epoch, source * stride, unit, control, report)
"""


class _ToTriton(ast.NodeTransformer):
    """Replaces ``gl``: layouts are left out, and every other Gluon function has the same meaning in
    Triton."""

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
    """Translate ``source``, a file of Gluon functions, to Triton."""
    module = _ToTriton().visit(ast.parse(source))
    module.body = module.body[1:]  # the docstring
    text = ast.unparse(ast.fix_missing_locations(module))
    assert "gl." not in text.replace("tl.", "") and "Layout(" not in text, (
        "a Gluon word that is not translated"
    )
    return f"from __future__ import annotations\n{WORDS}\n{text}\n"


def load_tasks(folder: str) -> Any:
    """The tasks of the Hopper kernel as a module of Triton functions."""
    path = Path(folder) / "combine_tasks_as_triton.py"
    path.write_text(as_triton(Path(str(gluon_tasks.__file__)).read_text()))
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_SUMS: dict[str, int] = {}  # of the cases that run
_FOLDER = TemporaryDirectory()
_tasks = load_tasks(_FOLDER.name)
clear_other_counts = _tasks.clear_other_counts
push_weights = _tasks.push_weights
list_rows = _tasks.list_rows
serve_tickets, COUNTER_WORDS = _tasks.serve_tickets, _tasks.COUNTER_WORDS
Cut, Current = _tasks.Cut, _tasks.Current


class Choices(NamedTuple):
    """The parameters of both kernels that the functions here read.

    ``COLS`` and ``WARPS`` are those of the partition that serves tickets. With ``PARTITIONS`` = 2,
    *reduce* and *multiply* are two programs.

    ``AHEAD`` : of *multiply*, see ``serve_tickets``. ``EARLY`` : *reduce* draws tickets.
    """

    WORLD_SIZE: int
    TOPK: int
    WEIGHTED: bool
    EXPERTS: int
    TILE_M: int
    TILE_N: int
    TILE_K: int
    GROUP_M: int
    EVEN_K: bool
    DEPTH_FIRST: bool
    TOKENS: int
    COLS: int
    SCALED: bool
    WARPS: int
    PARTITIONS: int
    SHARERS: int = 1
    AHEAD: int = 4
    EARLY: bool = True


@triton.jit
def translated_kernel(
    operands,
    tensors,
    peers,
    rank,
    sizes,
    tokens,
    max_tokens,
    chunks,
    chunk_cols,
    groups,
    group_blocks,
    blocks,
    C: tl.constexpr,
):
    """One program per rank has all roles, one after another, or the partitions are two programs.

    ``operands`` are ``combine_triton.Tensors``; ``tensors`` are those of the tasks.
    """
    WORLD_SIZE: tl.constexpr = C.WORLD_SIZE
    PARTITIONS: tl.constexpr = C.PARTITIONS
    WARPS: tl.constexpr = C.WARPS
    COLS: tl.constexpr = C.COLS
    partition = tl.program_id(0) % PARTITIONS
    program = tl.program_id(0) // PARTITIONS
    programs = tl.num_programs(0) // PARTITIONS
    cut = Cut(
        tokens,
        max_tokens,
        sizes.experts,
        sizes.cols,
        sizes.depth,
        chunks,
        chunk_cols,
        0,
        groups,
        group_blocks,
        blocks,
    )
    epoch = load_epoch(peers)
    parity = epoch & 1
    weights_offset = sizes.weights_base + parity.to(tl.int64) * sizes.weights_slot
    counts = peers.counters + parity * COUNTER_WORDS
    current = Current(rank, epoch, counts)
    if partition == 0:
        if program == 0:
            clear_other_counts(peers.counters, parity, WARPS)
        if C.WEIGHTED:
            weights = tensors.weights
            push_weights(weights, peers, cut, current, weights_offset, program, programs, C, WARPS)
        list_rows(tensors, peers, cut, current, weights_offset, program, programs, C, WARPS)
        if PARTITIONS == 2 and C.EARLY:
            serve_tickets(tensors, peers, cut, current, programs, C, COLS, WARPS, KINDS=1)
    if partition == PARTITIONS - 1:
        multiply_role(operands, sizes, cut, counts, program, programs, C)
        serve_tickets(
            tensors,
            peers,
            cut,
            current,
            programs,
            C,
            COLS,
            WARPS,
            KINDS=2,
            AHEAD=C.AHEAD,
        )
    if (partition == 0) & (program == programs - 1):
        for step in tl.static_range(1, WORLD_SIZE):  # also if this rank has no tokens
            index = (rank + step) % WORLD_SIZE * MAX_SLICES + chunks * groups
            wait(peers, index, epoch, -1)
    leave(peers, epoch, tl.num_programs(0))


def launch(
    peers: Peers,
    y: torch.Tensor,
    experts: torch.Tensor,
    offsets: torch.Tensor,
    entry_row: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: torch.Tensor | None,
    products: torch.Tensor,
    out: torch.Tensor,
    shape: GroupedProblem,
    config: CombineConfig,
    rank: int,
    num_sms: int,
) -> None:
    """As ``combine_triton.launch``, with one program per rank. With ``num_reduce`` = 0, two per
    multiprocessor; with ``num_finish`` = 0, *reduce* draws no tickets then."""
    s, c, cut = shape, config, CombineCut.of(shape, config)
    entries = s.world_size * s.max_tokens
    # NaN as a weight
    garbage = torch.full((entries * (2 * s.topk + 1),), 0x7FC00001, dtype=torch.int32)
    rows, factors, lengths = garbage.split([entries * s.topk, entries * s.topk, entries])
    factors = factors.view(torch.float32)
    products.fill_(float("nan"))
    given = offsets if weights is None else weights
    partitions = 2 if c.num_reduce == 0 else 1
    choices = plain.choices_of(experts, weights, shape, config)
    translated_kernel[(2 * num_sms if partitions == 2 else 1,)](
        plain.Tensors(y, experts, offsets, entry_row, topk_ids, given, products, out),
        gluon_tasks.Tensors(
            products, rows, factors, lengths, offsets, entry_row, topk_ids, given, out
        ),
        peers,
        rank,
        plain.sizes_of(peers, y, experts, shape),
        out.shape[0],
        s.max_tokens,
        cut.chunks,
        cut.chunk_cols,
        cut.groups,
        cut.group_blocks,
        cut.blocks,
        Choices(
            *choices,
            WARPS=c.num_warps,
            PARTITIONS=partitions,
            EARLY=c.num_finish > 0,
            **_SUMS,
        ),
    )


def parity(
    me: Member,
    cases: list[Case],
    configs: list[CombineConfig],
    weighted: bool = True,
    sums: dict[str, int] | None = None,
) -> None:
    """``combine.parity`` of the translated kernel. ``num_warps`` is that of the partition that
    serves tickets. ``sums``: AHEAD."""
    theirs, plain.launch = plain.launch, launch
    _SUMS.update(sums or {})
    try:
        for config in configs:
            combine.parity(me, cases, config, False, weighted)
    finally:
        plain.launch = theirs
        _SUMS.clear()


def sums_in_rank_order(me: Member, config: CombineConfig) -> None:
    """``combine.sums_in_rank_order`` of the translated kernel."""
    theirs, plain.launch = plain.launch, launch
    try:
        combine.sums_in_rank_order(me, config)
    finally:
        plain.launch = theirs
