"""all_gather_matmul: gather the row shards of x from all ranks and multiply by this rank's columns.

=========  ==========  ====================================================
x          [m, K]      shard of the rows, m = M/R; [m, ..., K] also works
w          [n, K]      this rank's rows of a Linear weight, n = N/R
bias       [n]         optional
y          [M, n]      gather(x) @ w.T + bias
gathered   [M, K]      gather(x), in memory of its own
=========  ==========  ====================================================

forward : one fused kernel (``kernels/all_gather_matmul.py``), or all-gather then matmul where that is faster.
dgrad   : gx = reduce_scatter(gy @ w), the dual operator; unfused until ``matmul_reduce_scatter`` lands.
wgrad   : gw = gy.T @ gather(x). x is gathered again beside dgrad's matmul, so that nothing but the shard is kept; with
          ``return_gathered=True`` the gathered input is kept, R times the memory of x, and nothing is sent again.
dbias   : gy summed over rows.

Source of the idea: FLUX, arXiv 2406.06858; the dual pair as in Megatron-LM sequence parallelism, arXiv 2205.05198.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist

from tileweave.config import Plan, Problem, plan_all_gather_matmul
from tileweave.errors import InputError, require
from tileweave.ops import reference
from tileweave.ops.all_gather_matmul_fused import OP, run_fused
from tileweave.ops.registry import (
    agree,
    debugging,
    define,
    group_of,
    interpreting,
    log_fallback,
    machine_of,
    name_of,
    publish,
    workspace_of,
)
from tileweave.topology import Machine
from tileweave.transport.collectives import all_gather_flat
from tileweave.transport.workspace import REGISTRY

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_SAID: set[tuple[str, str]] = set()


def all_gather_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | str | None = None,
    return_gathered: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multiply the row shards of all ranks by this rank's weight: ``gather(x) @ w.T + bias``.

    Parameters
    ----------
    x : [m, K] or [m, ..., K], contiguous; the same shape on every rank. Gathered along dimension 0.
    w : [n, K], rows contiguous, in ``torch.nn.Linear`` layout; the same shape on every rank.
    bias : [n], or None.
    group : the ranks that share x; None is the default group. A group's name is accepted too.
    return_gathered : also return gather(x) [R * m, ..., K]; backward then keeps it and sends nothing again.
    out : where to put the result, [R * m, ..., n], contiguous; not with gradients, not with ``return_gathered``.

    Returns
    -------
    y [R * m, ..., n], or ``(y, gathered)``. bf16 and fp16 on CUDA (fp32 unfused), also fp32 on the CPU; sums in fp32.

    Raises
    ------
    InputError (a ValueError) for what does not fit; PeerTimeout if a peer does not call in time; CaptureError under
    CUDA-graph capture without an earlier call or ``tw.warmup``.
    """
    name = name_of(group)
    flat = x.dim() == 2
    rows = x
    if not flat:
        require(x.dim() > 2, f"x of shape {tuple(x.shape)}", "[m, ..., K]", "add a row dimension")
        require(x.is_contiguous(), f"x with strides {x.stride()}", "a contiguous x", "pass x.contiguous()")
        rows = x.flatten(0, -2)
    if out is not None:
        _check_out(x, w, bias, out, return_gathered)
        torch.ops.tileweave.all_gather_matmul.out(rows, w, bias, name, out=out if flat else out.flatten(0, -2))
        return out
    y, gathered = torch.ops.tileweave.all_gather_matmul(rows, w, bias, name, return_gathered)
    if not flat:
        lead = (y.shape[0] // (rows.shape[0] // max(x.shape[0], 1) or 1), *x.shape[1:-1])
        y, gathered = y.view(*lead, y.shape[-1]), gathered.view(*lead, x.shape[-1]) if return_gathered else gathered
    return (y, gathered) if return_gathered else y


def _check_out(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, keep: bool) -> None:
    """What ``out=`` must be before it can be seen as rows; :func:`check_inputs` does the rest."""
    require(not keep, "out= with return_gathered=True", "one of them", "drop out=")
    dimensions = x.dim()
    fits = out.dim() == dimensions and out.is_contiguous() and (dimensions == 2 or out.shape[1:-1] == x.shape[1:-1])
    if not fits:  # the text of it takes longer than the checks
        asked = f"out {tuple(out.shape)} with strides {out.stride()} for x {tuple(x.shape)}"
        require(fits, asked, "[R * m, ..., n], contiguous", "allocate out with that shape")
    needed = x.requires_grad or w.requires_grad or out.requires_grad or (bias is not None and bias.requires_grad)
    tracked = needed and torch.is_grad_enabled()
    require(not tracked, "out= with tensors that require gradients", "one of them", "drop out=, or call under torch.no_grad()")


def check_inputs(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None, size: int) -> None:
    """Raise :class:`InputError` on the rank that made the mistake, before anything is sent."""
    shapes = f"x {tuple(x.shape)}, w {tuple(w.shape)}"
    require(x.dim() == 2 and w.dim() == 2, shapes, "x [m, K] and w [n, K]", "reshape to two dimensions")
    require(x.shape[1] == w.shape[1], shapes, "equal K, the last dimension of both", "transpose w to Linear layout [n, K]")
    dtypes = f"x {x.dtype}, w {w.dtype}" + (f", bias {bias.dtype}" if bias is not None else "")
    tensors = [t for t in (x, w, bias, out) if t is not None]
    require(x.dtype in _DTYPES, dtypes, "float16, bfloat16, float32", "convert x and w")
    require(all(t.dtype == x.dtype for t in tensors), dtypes, "one dtype for all tensors", "convert to x.dtype")
    devices = ", ".join(str(t.device) for t in tensors)
    require(all(t.device == x.device for t in tensors), devices, "one device", "move all tensors to x.device")
    require(x.is_contiguous(), f"x with strides {x.stride()}", "a contiguous x", "pass x.contiguous()")
    require(w.stride(1) == 1 or w.shape[1] <= 1, f"w with strides {w.stride()}", "contiguous rows", "pass w.contiguous()")
    if bias is not None:
        fits = tuple(bias.shape) == (w.shape[0],) and bias.is_contiguous()
        require(fits, f"bias {tuple(bias.shape)}", f"({w.shape[0]},), contiguous", "one bias for each row of w")
    if out is not None:
        shape = (size * x.shape[0], w.shape[0])
        fits = tuple(out.shape) == shape and out.is_contiguous()
        require(fits, f"out {tuple(out.shape)}", f"{shape}, contiguous", "allocate out with that shape")


def _refuse_alias(out: torch.Tensor, *inputs: torch.Tensor | None) -> None:
    """A tile is stored while others are still read: the result needs memory of its own."""
    place = out.untyped_storage().data_ptr()
    shared = out.numel() and any(t is not None and t.untyped_storage().data_ptr() == place for t in inputs)
    require(not shared, "out= in the storage of an input", "memory of its own", "allocate out")


def plan(x: torch.Tensor, w: torch.Tensor, size: int) -> Plan:
    """The path of this call, the same on every rank."""
    machine = machine_of(x.device)
    return _plan(size, x.shape[0], w.shape[0], x.shape[1], x.dtype, machine, interpreting())


@lru_cache(maxsize=4096)
def _plan(size: int, rows: int, cols: int, depth: int, dtype: torch.dtype, machine: Machine, interpreted: bool) -> Plan:
    problem = Problem(size, rows, cols, depth, dtype.itemsize, str(dtype).removeprefix("torch."))
    return plan_all_gather_matmul(problem, machine, interpreted)


def _forward(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group_name: str, out: torch.Tensor | None, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    workspace = REGISTRY.find(group_name, x.device)
    signature = (
        x.shape, x.stride(), x.dtype, x.device, w.shape, w.stride(), w.dtype, w.device,
        None if bias is None else _traits(bias), None if out is None else _traits(out),
    )  # fmt: skip
    chosen = None if workspace is None else workspace.accepted.get(signature)
    if out is not None:
        _refuse_alias(out, x, w, bias)
    if workspace is None or chosen is None or debugging():
        chosen = _accept(x, w, bias, group_name, out, keep)
        if chosen.config is None:
            return _unfused(x, w, bias, group_name, out, keep, chosen)
        workspace = workspace_of(group_name, x.device)
        workspace.accepted[signature] = chosen
    rows = workspace.transport.world_size * x.shape[0]
    y = x.new_empty(rows, w.shape[0]) if out is None else out
    gathered = x.new_empty(rows, x.shape[1]) if keep else None
    run_fused(x, w, bias, y, gathered, group_name, chosen)
    return y, x.new_empty(0) if gathered is None else gathered


def _traits(tensor: torch.Tensor) -> tuple[object, ...]:
    """All that the checks of a tensor depend on, but whose memory it is."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _accept(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group_name: str, out: torch.Tensor | None, keep: bool
) -> Plan:
    """Check the arguments and plan the call: once for each signature, since host time counts."""
    group = group_of(group_name)
    size = dist.get_world_size(group)
    if debugging():  # before the checks: a rank whose input is refused must not leave the others waiting
        bias_shape = None if bias is None else list(bias.shape)
        signature = {"x": list(x.shape), "w": list(w.shape), "bias": bias_shape, "dtype": str(x.dtype), "keep": keep}
        agree(group, x.device, {"op": OP, **signature})
    check_inputs(x, w, bias, out, size)
    return plan(x, w, size)


def _unfused(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group_name: str,
    out: torch.Tensor | None,
    keep: bool,
    chosen: Plan,
) -> tuple[torch.Tensor, torch.Tensor]:
    log_fallback(OP, chosen, _SAID)
    y, gathered = reference.all_gather_matmul(x, w, bias, group_of(group_name))
    if out is not None:
        y = out.copy_(y)
    return y, (gathered.clone() if gathered is x else gathered) if keep else x.new_empty(0)


def _implementation(x, w, bias, group_name, return_gathered=False):
    return _forward(x, w, bias, group_name, None, return_gathered)


def _implementation_out(x, w, bias, group_name, *, out):
    _forward(x, w, bias, group_name, out, False)


def _fake(x, w, bias, group_name, return_gathered=False):
    rows = dist.get_world_size(group_of(group_name)) * x.shape[0]
    return x.new_empty(rows, w.shape[0]), x.new_empty(rows, x.shape[1]) if return_gathered else x.new_empty(0)


def _fake_out(x, w, bias, group_name, *, out):
    return None


def _backward_implementation(grad, grad_gathered, x, w, gathered, group_name, need_x, need_w, need_bias):
    """Gradients of x, w, bias (empty where not needed); x is gathered again beside dgrad's matmul if it was not kept."""
    group = group_of(group_name)
    size = dist.get_world_size(group)
    grad = grad.contiguous()
    work = None
    if need_w and gathered is None:
        gathered = x
        if size > 1:
            gathered = x.new_empty(size * x.shape[0], x.shape[1])
            work = all_gather_flat(gathered, x, group=group, async_op=True)
    gx, gw, gb = (grad.new_empty(0) for _ in range(3))
    if need_x:
        full = grad @ w
        if grad_gathered is not None:
            full += grad_gathered
        gx = reference.reduce_scatter(full, group)
    if work is not None:
        work.wait()
    if need_w:
        gw = grad.t() @ gathered
    if need_bias:
        gb = grad.sum(0)
    return gx, gw, gb


def _backward_fake(grad, grad_gathered, x, w, gathered, group_name, need_x, need_w, need_bias):
    return (
        torch.empty_like(x) if need_x else grad.new_empty(0),
        w.new_empty(w.shape) if need_w else grad.new_empty(0),
        grad.new_empty(grad.shape[1]) if need_bias else grad.new_empty(0),
    )


def _setup_context(ctx, inputs, output) -> None:
    x, w, bias, ctx.group_name, ctx.keep = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, w, *((output[1],) if ctx.keep else ()))


def _backward(ctx, grad, grad_gathered):
    x, w, *kept = ctx.saved_tensors
    needs = ctx.needs_input_grad
    gx, gw, gb = torch.ops.tileweave.all_gather_matmul_backward(
        grad, grad_gathered if ctx.keep else None, x, w, kept[0] if kept else None, ctx.group_name,
        needs[0], needs[1], ctx.has_bias and needs[2],
    )  # fmt: skip
    return gx if needs[0] else None, gw if needs[1] else None, gb if ctx.has_bias and needs[2] else None, None, None


define(
    "all_gather_matmul(Tensor x, Tensor w, Tensor? bias, str group_name, bool return_gathered=False) -> (Tensor, Tensor)",
    _implementation,
    _fake,
    _backward,
    _setup_context,
)
define(
    "all_gather_matmul.out(Tensor x, Tensor w, Tensor? bias, str group_name, *, Tensor(a!) out) -> ()",
    _implementation_out,
    _fake_out,
)
define(
    "all_gather_matmul_backward(Tensor grad, Tensor? grad_gathered, Tensor x, Tensor w, Tensor? gathered,"
    " str group_name, bool need_x, bool need_w, bool need_bias) -> (Tensor, Tensor, Tensor)",
    _backward_implementation,
    _backward_fake,
)


def explain(x: torch.Tensor, w: torch.Tensor, group: dist.ProcessGroup | str | None = None) -> Plan:
    """Which path a call with these tensors takes, and why. Sends nothing."""
    group = group_of(name_of(group))
    check_inputs(x, w, None, None, dist.get_world_size(group))
    return plan(x, w, dist.get_world_size(group))


def warmup(
    rows: int,
    cols: int,
    depth: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | str | None = None,
) -> Plan:
    """Collective: reserve memory and compile for x [rows, depth], w [cols, depth], so that a capture may follow."""
    if rows < 0 or cols < 0 or depth < 0:
        raise InputError(f"asked: warmup({rows}, {cols}, {depth}); allowed: sizes of 0 and more; remedy: pass a shard's sizes")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    x, w = torch.zeros(rows, depth, dtype=dtype, device=where), torch.zeros(cols, depth, dtype=dtype, device=where)
    all_gather_matmul(x, w, group=group)
    return plan(x, w, dist.get_world_size(group_of(name_of(group))))


publish(OP, explain, warmup)
