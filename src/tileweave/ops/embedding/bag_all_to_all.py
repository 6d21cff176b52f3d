"""embedding_bag_all_to_all: pool the bags of the global batch from this rank's tables, each vector
to its sample's owner.

=========  =======================  ==============================================================================
tables     T of [rows_t, D_t]       this rank's embedding tables, whole or some columns of them; T and D_t differ by rank
indices    [N]                      rows to pool, table after table, in each sample after sample; int32 or int64
offsets    [T * B + 1]              bag (t, s) is ``indices[offsets[t * B + s] : offsets[t * B + s + 1]]``
y          [B/R, sum of all D]      this rank's samples, columns of all ranks' tables as the layout says
=========  =======================  ==============================================================================

forward : one kernel (``kernels/embedding/bag_all_to_all.py``) that pools and stores to the owner,
    in place. backward: gy's columns go straight to the tables' owners (``backward.py``), where the
    rows of each table
          that were looked up are summed in a fixed order: a dense gradient, a sparse one, or an
          optimizer's step in place.
weights : gw[i] = table row . gradient of its bag.

Sources: fused embedding + all-to-all, arXiv 2305.06942; the contract of TorchRec's
PooledEmbeddingsAllToAll.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tileweave.errors import require
from tileweave.ops import reference
from tileweave.ops.core.registry import (
    debugging,
    group_of,
    log_fallback,
    name_of,
    number_of,
)
from tileweave.ops.core.spec import Backward, OperatorSpec
from tileweave.ops.embedding.backward import backward, setup_context
from tileweave.ops.embedding.bag_all_to_all_fused import OP, run_fused, run_lookup
from tileweave.ops.embedding.inputs import (
    Call,
    FusedOptimizer,
    agree_on_call,
    check_inputs,
    count_bags,
    dims_of,
    exchanged_layout,
    plan,
    refuse_shared,
    step_of,
)
from tileweave.ops.embedding.table_gradient import KINDS
from tileweave.planning.problem import Plan
from tileweave.planning.sharding import EmbeddingConfig, EmbeddingLayout

_METAS: dict = {}
# compilers cannot make a tensor that requires a gradient
_ANCHOR = torch.zeros(0, device="cpu", requires_grad=True)


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
    group: dist.ProcessGroup | str | None = None,
    anchor: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pool bags of the global batch from this rank's tables, and get the pooled vectors of all
    ranks for own samples.

    Parameters
    ----------
    tables : of one dtype, contiguous [rows, D]; may be empty on some ranks.
    indices : [N], int32 or int64, table by table, sample by sample. offsets : [T * B + 1], of T
        tables, int32 or int64: where bags begin, and N at the end (torch's
        ``include_last_offset``).
    batch : B, samples of all ranks; needed where this rank has no tables. Rank r owns samples [r *
        c, (r+1) * c), c = ceil(B / R).
    mode : "sum" or "mean". An empty bag gives zeros. per_sample_weights : [N], only with "sum".
    layout : the columns of every rank's tables in y, the same on all ranks. None: rank by rank,
        table by table, which the ranks tell each other in each call, and the host waits for it:
        pass a layout in a loop.
    out_dtype : of y and of what travels; None: that of the tables.
    gradient : "dense" or "sparse" gradients of the tables; optimizer : step in backward instead, of
        tables that require it. Gradients are for all or for none: a rank without tables takes part
        in backward whenever gradients are enabled, or, given an ``anchor``, if that requires one. A
        fused step wants memory of its own for each table; and gradients of per_sample_weights read
        the tables in backward, so another lookup's step must not come between (not seen when
        compiled).
    divide_gradient : gradients of tables and weights over R, as when a loss is a mean over ranks.
    out : an earlier result, which peers then write again, or any contiguous [b, width] tensor; not
        with gradients.

    Returns
    -------
    y [b, width]. It stands in symmetric memory of its own for as long as anyone holds it; who reads
    it on another stream holds it until that one is done (``record_stream`` does nothing here).

    Raises
    ------
    InputError for what does not fit; with ``TILEWEAVE_DEBUG=1`` also for indices out of range,
    which otherwise read nothing and count as zeros. PeerTimeout, CaptureError as every operator.
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
    """Pool bags from several tables at once, on this rank alone:
    ``torch.nn.functional.embedding_bag`` for many tables.

    tables T of [rows_t, D_t], indices [N], offsets [T * B + 1] as in
    :func:`embedding_bag_all_to_all`; gives [B, sum of D], or table t from ``columns[t]`` on. Other
    arguments as there.
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
    tables,
    indices,
    offsets,
    batch,
    mode,
    weights,
    layout,
    out_dtype,
    gradient,
    optimizer,
    divide,
    name,
    out,
    anchor=None,
):
    """Both public functions; what depends on the group is checked inside the operator, where
    compilers do not look."""
    tables = list(tables)
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
        # a rank without tables: what a call returned requires a gradient
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
        torch.ops.tileweave.embedding_bag_all_to_all.out(*common, out=out)
        return out
    if tables:
        anchor = None
    elif (
        anchor is None and torch.is_grad_enabled()
    ):  # this rank has to send gradients on, though it has none of its own
        anchor = _ANCHOR.to(indices.device)
    return torch.ops.tileweave.embedding_bag_all_to_all(
        *common, kind, divide, states, rate, epsilon, anchor
    )


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
    gradient: str = KINDS[0],
    divide: bool = False,
    states: Sequence[torch.Tensor] = (),
    rate: torch.Tensor | None = None,
    epsilon: float = 0.0,
    anchor: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    columns = EmbeddingLayout.unflatten(layout)
    call = Call(tables, indices, offsets, weights, columns, batch, mean, out_dtype, group_name)
    group = group_of(call.group_name) if call.group_name else None
    size, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
    if debugging():
        agree_on_call(call, size)
    refuse_shared((*tables, *states) if gradient in KINDS[2:] else ())  # what backward changes
    check_inputs(call, out, size, rank)
    chosen = plan(call.tables, call.indices, call.batch, size)
    if chosen.config is None:
        log_fallback(OP, chosen)
        y = reference.embedding_bag_all_to_all(*call[:-1], group if size > 1 else None)
        return y if out is None else out.copy_(y)
    if chosen.path == "fused":
        # Of integers: the same in every process.
        mark = (
            hash((number_of(OP), number_of(call.out_dtype), call.batch, call.mean, call.layout))
            or 1
        )
        return run_fused(*call, chosen.config, out, mark)
    y = run_lookup(
        tables,
        indices,
        offsets,
        weights,
        columns.columns[0],
        columns.width,
        batch,
        mean,
        out_dtype,
        chosen.config,
        _METAS,
        out,
    )
    return y if tables else y.zero_()


def _fake(
    tables, indices, offsets, weights, layout, batch, mean, out_dtype, group_name, *_, out=None
):
    found = EmbeddingLayout.unflatten(layout)
    rank = dist.get_rank(group_of(group_name)) if group_name else 0
    # as rows_of, which would ask how large a batch is that compilers leave open
    chunk = -(-batch // len(found.dims))
    begin, end = (torch.sym_min(r * chunk, batch) for r in (rank, rank + 1))
    return indices.new_empty(end - begin, found.width, dtype=out_dtype)


def explain(
    tables: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    batch: int | None = None,
    group: dist.ProcessGroup | str | None = None,
) -> Plan[EmbeddingConfig]:
    """Which path a call with these tensors takes, and why. Sends nothing."""
    dims_of(tables)
    batch = (offsets.numel() - 1) // max(len(tables), 1) if batch is None else batch
    return plan(tables, indices, batch, dist.get_world_size(group_of(name_of(group))))


SPEC = OperatorSpec(
    call=embedding_bag_all_to_all,
    arguments="Tensor[] tables, Tensor indices, Tensor offsets, Tensor? weights, int[] layout,"
    " SymInt batch, bool mean, ScalarType out_dtype, str group_name",
    options="str gradient, bool divide, Tensor[] states, Tensor? rate, float epsilon, Tensor? anchor",
    forward=_forward,
    fake=_fake,
    explain=explain,
    backward=Backward(setup_context, backward),
    reference=reference.embedding_bag_all_to_all,
    kernel="tileweave.kernels.embedding.bag_all_to_all",
)
