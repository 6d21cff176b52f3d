"""embedding_bag_all_to_all: pool bags of the global batch, and send each vector to its sample's
rank.

=========  ====================  ==========================================================
tables     T of [rows_t, D_t]    this rank's embedding tables, whole or some of their
                                 columns; T and D_t differ between ranks
indices    [N]                   rows to pool, sorted by table, then by sample; int32 or
                                 int64
offsets    [T * B + 1]           bag (t, s) is ``indices[offsets[t * B + s] :
                                 offsets[t * B + s + 1]]``
y          [B/R, sum of all D]   this rank's samples, with the columns of all ranks' tables
                                 in the order of the layout
=========  ====================  ==========================================================

forward : one kernel (``kernels/embedding/bag_all_to_all.py``) pools vectors and stores them on the
sample's rank, in the result.

backward : columns of gy are sent to the ranks of the tables (``backward.py``). There the gradients
of each looked-up row are summed in a fixed order. The result is a dense gradient, a sparse one, or
an optimizer's step in place.

gradient of weights : gw[i] = dot product of the table row and the gradient of its bag.

Sources: fused embedding + all-to-all, arXiv 2305.06942; interface of TorchRec's
PooledEmbeddingsAllToAll.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.core.argument_types import checks_types
from tileweave.ops.core.dtensors import refuse_dtensors
from tileweave.ops.core.nodes import known_topology_of, topology_of
from tileweave.ops.core.operator import operator
from tileweave.ops.core.registry import (
    Group,
    debugging,
    group_of,
    log_fallback,
    name_of,
    number_of,
)
from tileweave.ops.core.spec import Backward, OperatorSpec
from tileweave.ops.embedding import over_nodes
from tileweave.ops.embedding.backward import backward, setup_context
from tileweave.ops.embedding.bag_all_to_all_fused import (
    Prepared,
    prepare,
    run_fused,
    run_lookup,
    run_prepared,
)
from tileweave.ops.embedding.call import OP, Call
from tileweave.ops.embedding.inputs import (
    FusedOptimizer,
    agree_on_call,
    check_inputs,
    check_out,
    check_rising,
    count_bags,
    dims_of,
    exchanged_layout,
    plan,
    refuse_shared,
    step_of,
)
from tileweave.ops.embedding.table_gradient import KINDS
from tileweave.planning.problem import Plan
from tileweave.planning.sharding import EmbeddingConfig, EmbeddingLayout, unroll_of
from tileweave.planning.topology import Topology
from tileweave.transport.workspace import REGISTRY, Instance

_OPERATOR, _INTO_OUT = operator(OP), operator(f"{OP}.out")
_METAS: dict = {}
# made here: compilers cannot make a tensor that requires a gradient
_ANCHOR = torch.zeros(0, device="cpu", requires_grad=True)


@checks_types
def embedding_bag_all_to_all(
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    *,
    batch: int | None = None,
    mode: str = "sum",
    per_sample_weights: torch.Tensor | None = None,
    layout: EmbeddingLayout | None = None,
    out_dtype: torch.dtype | None = None,
    gradient: str = "dense",
    optimizer: FusedOptimizer | None = None,
    divide_gradient: bool = False,
    group: Group | None = None,
    anchor: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pool bags of the global batch from this rank's tables; return this rank's samples of all
    tables.

    Parameters
    ----------
    tables : sequence of [rows_t, D_t], contiguous
        This rank's tables, of one dtype: float32, float16 or bfloat16. May be empty on some ranks.

    indices : [N], int32 or int64
        Rows to pool, sorted by table, then by sample.

    offsets : [T * B + 1], int32 or int64
        Where each bag begins in ``indices``, and N at the end (``include_last_offset`` in torch).

    batch : int, optional
        B, the number of samples of all ranks. Needed on ranks without tables. Rank r has samples [r
        * c, (r + 1) * c) with c = ceil(B / R).

    mode : str
        "sum" or "mean". An empty bag gives zeros.

    per_sample_weights : [N], float32, float16 or bfloat16, optional
        Weights of vectors, only with "sum".

    layout : EmbeddingLayout, optional
        The columns of every rank's tables in y, the same on all ranks. None: ordered by rank, then
        by table. Ranks then exchange their sizes in each call, and the host waits for it: pass a
        layout in a loop.

    out_dtype : torch.dtype, optional
        Dtype of y and of what is sent. None: the dtype of the tables.

    gradient : str
        "dense" or "sparse" gradients of the tables.

    optimizer : FusedOptimizer, optional
        Take a step in the backward instead, of tables that require a gradient. Each table needs
        memory of its own. Gradients of ``per_sample_weights`` read the tables in the backward, so
        no other lookup may take a step in between (not detected when compiled).

    divide_gradient : bool
        Divide gradients of tables and weights by R, for a loss that is a mean over ranks.

    group : ProcessGroup, DeviceMesh or str, optional
        The ranks that call together: a group, its name, or a DeviceMesh of one dimension. None:
        the default group.

    anchor : tensor, optional
        On a rank without tables: whether it takes part in the backward. Gradients must be computed
        on all ranks or on none. Without an anchor such a rank takes part whenever gradients are
        enabled; with one, only if the anchor requires a gradient.

    out : [b, width], contiguous, optional
        Memory for the result. Peers write straight into an earlier result of this operator. Not
        with gradients.

    Returns
    -------
    y : [b, width]
        b samples of this rank. The memory is symmetric, and is not used again as long as a
        reference to y exists. Code that reads it on another stream must keep a reference until that
        stream is done (``record_stream`` has no effect here).

    Raises
    ------
    InputError
        (a ValueError) A shape, dtype, device or memory layout that the operator does not take. With
        ``TILEWEAVE_DEBUG=1`` also indices out of range, which otherwise read nothing and count as
        zeros.
    RankMismatchError
        (an InputError) Ranks called different operators, or the same one with other arguments.
    PeerTimeout
        A peer does not call in time.
    CaptureError
        CUDA-graph capture without an earlier call of the same size and tables, or ``tw.warmup``.

    Notes
    -----
    Sources: arXiv 2305.06942; TorchRec's PooledEmbeddingsAllToAll.
    """
    return _call(
        tables,
        indices,
        offsets,
        batch,
        mode,
        per_sample_weights,
        layout,
        out_dtype,
        gradient,
        optimizer,
        divide_gradient,
        name_of(group),
        out,
        anchor,
    )


@checks_types
def embedding_bag(
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    *,
    mode: str = "sum",
    per_sample_weights: torch.Tensor | None = None,
    columns: Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
    gradient: str = "dense",
    optimizer: FusedOptimizer | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pool bags from several tables at once, on this rank alone.

    As ``torch.nn.functional.embedding_bag``, for many tables.

    Parameters
    ----------
    tables : sequence of [rows_t, D_t], contiguous
        This rank's tables, of one dtype: float32, float16 or bfloat16. May be empty on some ranks.

    indices : [N], int32 or int64
        Rows to pool, sorted by table, then by sample.

    offsets : [T * B + 1], int32 or int64
        Where each bag begins in ``indices``, and N at the end (``include_last_offset`` in torch).

    mode : str
        As in :func:`embedding_bag_all_to_all`, as are the next five.

    per_sample_weights : tensor, optional
        Weights of the indices.

    out_dtype : torch.dtype, optional
        Dtype of the result.

    gradient : str
        Kind of the gradients of tables.

    optimizer : FusedOptimizer, optional
        The step that backward takes in place.

    out : tensor, optional
        Written to and returned.

    columns : sequence of int, optional
        First column of each table in the result. None: tables in order.

    Returns
    -------
    [B, sum of D_t]
        Pooled vectors.

    Raises
    ------
    InputError
        (a ValueError) A shape, dtype, device or memory layout that the operator does not take.
    """
    layout = None if columns is None else EmbeddingLayout((tuple(columns),), (dims_of(tables),))
    return _call(
        tables,
        indices,
        offsets,
        None,
        mode,
        per_sample_weights,
        layout,
        out_dtype,
        gradient,
        optimizer,
        False,
        "",
        out,
    )


def _call(
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    batch: int | None,
    mode: str,
    weights: torch.Tensor | None,
    layout: EmbeddingLayout | None,
    out_dtype: torch.dtype | None,
    gradient: str,
    optimizer: FusedOptimizer | None,
    divide: bool,
    name: str,
    out: torch.Tensor | None,
    anchor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Make a call of either public function.

    What depends on the group is checked inside the operator, which compilers do not trace.
    """
    tables = list(tables)
    refuse_dtensors(
        tables=tables, indices=indices, offsets=offsets, per_sample_weights=weights, out=out
    )
    require(mode in ("sum", "mean"), f"mode {mode!r}", '"sum" or "mean"', "pass one of these")
    require(
        gradient in KINDS[:2],
        f"gradient {gradient!r}",
        '"dense" or "sparse"',
        "for a fused step pass optimizer=",
    )
    if batch is None:
        require(
            len(tables) > 0,
            "no tables and no batch",
            "batch= where a rank has no tables",
            "pass batch=",
        )
        batch = count_bags(indices, offsets, len(tables))
    if out_dtype is None:
        require(
            len(tables) > 0,
            "no tables and no out_dtype",
            "out_dtype= where there are none",
            "pass it",
        )
        out_dtype = tables[0].dtype
    kind, states, rate, epsilon = step_of(tables, gradient, optimizer)
    numbers = (exchanged_layout(tables, indices.device, name) if layout is None else layout).flat()
    common = (tables, indices, offsets, weights, numbers, batch, mode == "mean", out_dtype, name)
    if out is not None:
        # on a rank without tables, an earlier result requires a gradient through the anchor
        mine = [out, *tables] if tables else []
        tracked = torch.is_grad_enabled() and any(
            t.requires_grad for t in (*mine, *([] if weights is None else [weights]))
        )
        require(
            not tracked,
            "out= with tensors that require gradients",
            "one of them",
            "call under torch.no_grad()",
        )
        _INTO_OUT(*common, out=out)
        return out
    if tables:
        anchor = None
    elif (
        anchor is None and torch.is_grad_enabled()
    ):  # this rank must send gradients to owners, though it has no tables
        anchor = _ANCHOR.to(indices.device)
    # a graph of torch.compile takes results in memory of its own
    lends = not torch.compiler.is_compiling()
    return _OPERATOR(*common, lends, kind, divide, states, rate, epsilon, anchor)


@dataclass(slots=True, eq=False)
class Accepted:
    """Calls of one signature: checked and planned.

    ready : (version of the instance, instance, what :func:`prepare` made for that version).
    """

    layout: EmbeddingLayout
    config: EmbeddingConfig
    checksum: int
    ready: tuple[int, Instance, list[Any]] | None = None

    def prepared(self, call: Call) -> Prepared:
        """What ``call`` needs, made again after memory of the instance has moved."""
        if self.ready is not None:
            version, instance, kept = self.ready
            if version == instance.version:
                return kept[0]
        made = prepare(call, self.config)
        instance = made.instance
        self.ready = instance.version, instance, instance.until_memory_moves(made)
        return made


def _signature(
    tables: Sequence[torch.Tensor],
    lists: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    batch: int,
    *words: object,
) -> tuple[object, ...]:
    """What the checks and the plan of a call depend on, and the addresses of its tables.

    ``lists``: indices, offsets and weights. ``words``: its other numbers.
    """
    indices, offsets, weights = lists
    # numbers that are equal may differ in type: 4.0 is refused
    facts: list[object] = [OP, type(batch), batch, *words, offsets.numel()]
    facts.append(unroll_of(indices.numel() / max(len(tables) * batch, 1)))
    for t in tables:
        facts += t.data_ptr(), t.shape, t.dtype, t.is_contiguous(), t.get_device()
    for t in lists:
        if t is not None:
            facts += t.dtype, t.dim(), t.is_contiguous(), t.get_device()
    facts.append(None if weights is None else weights.numel() == indices.numel())
    return tuple(facts)


def _forward(
    tables: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    layout: list[int],
    batch: int,
    mean: bool,
    out_dtype: torch.dtype,
    group_name: str,
    lends: bool = True,
    gradient: str = KINDS[0],
    divide: bool = False,
    states: Sequence[torch.Tensor] = (),
    rate: torch.Tensor | None = None,
    epsilon: float = 0.0,
    anchor: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    if gradient in KINDS[2:]:
        refuse_shared((*tables, *states))  # what the backward changes
    debug = debugging()
    workspace = REGISTRY.find(group_name, indices.device) if group_name and not debug else None
    signature, known = None, None
    if workspace is not None:
        lists = indices, offsets, weights
        signature = _signature(tables, lists, batch, mean, out_dtype, *layout)
        known: Accepted | None = workspace.accepted.get(signature)
    columns = EmbeddingLayout.unflatten(layout) if known is None else known.layout
    call = Call(tables, indices, offsets, weights, columns, batch, mean, out_dtype, group_name)
    if workspace is not None and known is not None:
        check_rising(indices, offsets)
        check_out(call, out, workspace.transport.world_size, workspace.transport.rank)
        return run_prepared(known.prepared(call), call, out, known.checksum, lends)
    group = group_of(call.group_name) if call.group_name else None
    size, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
    if debug:
        agree_on_call(call, size)
    check_inputs(call, out, size, rank)
    ranks = Topology.one_node(size) if group is None else topology_of(group, indices.device)
    chosen = plan(call.tables, call.indices, call.batch, ranks)
    if chosen.config is None:
        log_fallback(OP, chosen)
        y = reference.embedding_bag_all_to_all(*call[:-1], group if size > 1 else None)
        return y if out is None else out.copy_(y)
    if chosen.path == "fused":
        # A hash of integers: the same in every process.
        checksum = (
            hash((number_of(OP), number_of(call.out_dtype), call.batch, call.mean, call.layout))
            or 1
        )
        if chosen.config.nodes > 1:
            return over_nodes.run(call, chosen.config, out, checksum, lends)
        if workspace is None:  # the first call, or debugging: nothing of it is kept
            return run_fused(call, chosen.config, out, checksum, lends=lends)
        known = workspace.accepted[signature] = Accepted(columns, chosen.config, checksum)
        return run_prepared(known.prepared(call), call, out, checksum, lends)
    if out is None:
        out = indices.new_empty(batch, columns.width, dtype=out_dtype)
    run_lookup(call, columns.columns[0], out, chosen.config, _METAS)
    return out if tables else out.zero_()


def _fake(
    tables: list[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    layout: list[int],
    batch: int,
    mean: bool,
    out_dtype: torch.dtype,
    group_name: str,
    *_: Any,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    found = EmbeddingLayout.unflatten(layout)
    rank = dist.get_rank(group_of(group_name)) if group_name else 0
    # as rows_of, which does not take a symbolic batch
    chunk = -(-batch // len(found.dims))
    begin, end = (torch.sym_min(r * chunk, batch) for r in (rank, rank + 1))
    return indices.new_empty(end - begin, found.width, dtype=out_dtype)  # type: ignore[arg-type]


def explain(
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    batch: int | None = None,
    group: Group | None = None,
) -> Plan[EmbeddingConfig]:
    """Return the plan of a call with these tensors: which path it takes, and why. Sends nothing."""
    dims_of(tables)
    batch = (offsets.numel() - 1) // max(len(tables), 1) if batch is None else batch
    return plan(tables, indices, batch, known_topology_of(name_of(group)))


SPEC = OperatorSpec(
    call=embedding_bag_all_to_all,
    arguments="Tensor[] tables, Tensor indices, Tensor offsets, Tensor? weights, int[] layout,"
    " SymInt batch, bool mean, ScalarType out_dtype, str group_name",
    options="bool lends, str gradient, bool divide, Tensor[] states, Tensor? rate, float epsilon,"
    " Tensor? anchor",
    forward=_forward,
    fake=_fake,
    explain=explain,
    backward=Backward(setup_context, backward),
    reference=reference.embedding_bag_all_to_all,
    kernel="tileweave.kernels.embedding.bag_all_to_all",
)
