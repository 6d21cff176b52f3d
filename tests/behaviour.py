"""Bodies of the tests that CPU and GPU worlds share: what a user of the operator relies on beside its numbers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
import torch.distributed as dist
from tests.parity import Case, draw, draw_bias, draw_w, draw_x, prepare, verify
from tests.worlds import Member

import tileweave as tw
from tileweave.ops import reference
from tileweave.ops.registry import name_of
from tileweave.transport.workspace import REGISTRY

# Largest relative error (Frobenius norm) of a gradient: sums over all ranks, of products that were rounded before.
GRADIENT_ERROR = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


# --- The public call ---


def public_calls(me: Member, cases: list[Case], path: str) -> None:
    """tw.all_gather_matmul by its own plan, with every way to ask for results."""
    for number, case in enumerate(cases):
        call = prepare(case, me.rank, me.world_size, me.device, number)
        plan = tw.explain("all_gather_matmul", call.x, call.w)
        assert plan.path == path, f"{case}: {plan}"
        y = tw.all_gather_matmul(call.x, call.w, call.bias)
        call.verify(f"rank {me.rank}, returned", y)
        back = tw.all_gather_matmul(call.x, call.w, call.bias, out=call.out)
        assert back is call.out, "out= is what comes back"
        call.verify(f"rank {me.rank}, out=", call.out)
        y, gathered = tw.all_gather_matmul(call.x, call.w, call.bias, return_gathered=True)
        call.verify(f"rank {me.rank}, return_gathered", y, gathered)
        assert gathered.data_ptr() != call.x.data_ptr(), "the gathered input has memory of its own"
        y, gathered = reference.all_gather_matmul(call.x, call.w, call.bias, dist.group.WORLD)
        call.verify(f"rank {me.rank}, the reference itself", y, gathered)


def public_calls_in_a_subgroup(me: Member, members: list[int], case: Case) -> None:
    """A group by object, and by name."""
    group = me.group(*members)
    if group is not None:
        call = prepare(case, dist.get_rank(group), len(members), me.device, 5)
        for given in (group, name_of(group)):
            y, gathered = tw.all_gather_matmul(call.x, call.w, call.bias, group=given, return_gathered=True)
            call.verify(f"rank {me.rank} of the world in {members}", y, gathered)
    me.barrier()


def many_dimensions(me: Member, case: Case) -> None:
    """x [m, a, b, K] gives y [R * m, a, b, n]; dimension 0 is gathered."""
    call = prepare(case, me.rank, me.world_size, me.device, 3)
    for lead in ((case.rows // 6, 2, 3), (case.rows // 2, 2), (1, case.rows), (case.rows, 1)):
        total = (lead[0] * me.world_size, *lead[1:])
        x = call.x.view(*lead, case.depth)
        y, gathered = tw.all_gather_matmul(x, call.w, call.bias, return_gathered=True)
        assert y.shape == (*total, case.cols), f"x {tuple(x.shape)} gave y {tuple(y.shape)}"
        assert gathered.shape == (*total, case.depth), f"x {tuple(x.shape)} gave gathered {tuple(gathered.shape)}"
        call.verify(f"x {tuple(x.shape)}", y.reshape(-1, case.cols), gathered.reshape(-1, case.depth))
        out = torch.full((*total, case.cols), float("nan"), dtype=x.dtype, device=me.device)
        tw.all_gather_matmul(x, call.w, call.bias, out=out)
        call.verify(f"x {tuple(x.shape)}, out=", out.view(-1, case.cols))


def empty_dimensions(me: Member, dtype: str) -> None:
    """A size of zero is no error: there is nothing to multiply, or nothing to add to the bias."""
    for rows, cols, depth in ((0, 8, 16), (4, 0, 16), (4, 8, 0), (0, 0, 0)):
        case = Case(rows, cols, depth, dtype)
        x = torch.ones(rows, depth, dtype=case.torch_dtype, device=me.device)
        w = torch.ones(cols, depth, dtype=case.torch_dtype, device=me.device)
        bias = torch.arange(cols, device=me.device).to(case.torch_dtype)
        y, gathered = tw.all_gather_matmul(x, w, bias, return_gathered=True)
        assert gathered.shape == (me.world_size * rows, depth), f"{case}: gathered {tuple(gathered.shape)}"
        want = bias.expand(me.world_size * rows, cols) + depth
        assert torch.equal(y, want), f"{case}: {y}"


def close_frees_at_once(me: Member, case: Case) -> None:
    """Nothing is left to the garbage collector: it may run while a graph is captured, which torch does not survive."""
    call = prepare(case, me.rank, me.world_size, me.device, 8)
    call.verify("before", tw.all_gather_matmul(call.x, call.w, call.bias))
    workspace = REGISTRY.find(name_of(None), me.device)
    assert workspace is not None and workspace.instances, "the call was a fused one"
    held = [weakref.ref(instance.slots) for instance in workspace.instances.values()]
    del workspace
    gc.disable()
    try:
        tw.close()
        assert not any(reference() is not None for reference in held), "slots outlive their workspace"
    finally:
        gc.enable()
    me.barrier()


def weight_in_a_larger_tensor(me: Member, case: Case) -> None:
    """Rows of w need not follow each other: a slice of a fused weight works without a copy."""
    call = prepare(case, me.rank, me.world_size, me.device, 4)
    wide = torch.full((case.cols, case.depth + 24), float("nan"), dtype=case.torch_dtype, device=me.device)
    wide[:, 8 : 8 + case.depth] = call.w
    call.verify("w with a row stride", tw.all_gather_matmul(call.x, wide[:, 8 : 8 + case.depth], call.bias))


# --- Gradients ---


@dataclass
class Leaves:
    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None

    def __iter__(self):
        return iter((self.x, self.w, self.bias))


def _leaves(case: Case, rank: int, device: torch.device, wanted: str, dtype: torch.dtype | None = None) -> Leaves:
    found = [maker(case, rank, device, 77) for maker in (draw_x, draw_w, draw_bias)]
    tensors = [None if t is None else t.to(dtype or t.dtype) for t in found]
    for name, tensor in zip("xwb", tensors, strict=True):
        if tensor is not None:
            tensor.requires_grad_(name in wanted)
    return Leaves(*tensors)


def _coefficients(case: Case, rank: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    rows = size * case.rows
    return draw((rows, case.cols), case, 1.0, device, 88, rank), draw((rows, case.depth), case, 1.0, device, 99, rank)


def expected_gradients(case: Case, rank: int, size: int, device: torch.device) -> Leaves:
    """One process does what all ranks do together, in fp64."""
    everyone = [_leaves(case, r, device, "xwb", torch.float64) for r in range(size)]
    gathered = torch.cat([leaves.x for leaves in everyone])
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for r, leaves in enumerate(everyone):
        c, d = _coefficients(case, r, size, device)
        loss = loss + (torch.nn.functional.linear(gathered, leaves.w, leaves.bias) * c).sum()
        if case.gathered:
            loss = loss + (gathered * d).sum()
    loss.backward()
    mine = everyone[rank]
    return Leaves(mine.x.grad, mine.w.grad, None if mine.bias is None else mine.bias.grad)


def gradients(me: Member, cases: list[Case], wanted: str = "xwb", backend: str | None = None) -> None:
    """Gradients of x, w and bias, through y and, where it is kept, through the gathered input; also compiled."""
    for case in cases:
        function: Callable[..., torch.Tensor] = weighted_sum
        if backend is not None:
            torch._dynamo.reset()
            function = torch.compile(weighted_sum, fullgraph=True, backend=backend)
        for again in range(2):
            leaves = _leaves(case, me.rank, me.device, wanted)
            c, d = _coefficients(case, me.rank, me.world_size, me.device)
            function(*leaves, c, d if case.gathered else None).backward()
            want = expected_gradients(case, me.rank, me.world_size, me.device)
            for name, leaf, right in zip("xwb", leaves, want, strict=True):
                what = f"rank {me.rank}, {case}, {wanted}, {backend}, call {again}: gradient of {name}"
                if leaf is None or name not in wanted:
                    assert leaf is None or leaf.grad is None, f"{what} was not asked for"
                    continue
                assert leaf.grad.dtype == leaf.dtype, f"{what} has dtype {leaf.grad.dtype}"
                error = float((leaf.grad.double() - right).norm() / right.norm())
                assert error < GRADIENT_ERROR[case.dtype], f"{what} is off by {error:.2e}"


def weighted_sum(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, c: torch.Tensor, d: torch.Tensor | None
) -> torch.Tensor:
    """A loss in which every element of y, and of the gathered input if ``d`` is given, has a weight of its own."""
    if d is None:
        return (tw.all_gather_matmul(x, w, bias) * c).sum()
    y, gathered = tw.all_gather_matmul(x, w, bias, return_gathered=True)
    return (y * c).sum() + (gathered * d).sum()


def what_backward_keeps(me: Member, case: Case) -> None:
    """Without ``return_gathered`` nothing but the shard and the weight; with it nothing is gathered again."""
    ops = import_module("tileweave.ops.all_gather_matmul")
    gather, sent = ops.all_gather_flat, []

    def count(*args: object, **kwargs: object) -> object:
        sent.append(1)
        return gather(*args, **kwargs)

    ops.all_gather_flat = count
    try:
        for keep, rows, again in ((False, case.rows, 1), (True, case.rows * (1 + me.world_size), 0)):
            kept: list[torch.Tensor] = []
            sent.clear()
            leaves = _leaves(case, me.rank, me.device, "xwb")
            with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
                answer = tw.all_gather_matmul(*leaves, return_gathered=keep)
            y = answer[0] if keep else answer
            held = sum(t.numel() for t in {t.data_ptr(): t for t in kept}.values())
            limit = rows * case.depth + leaves.w.numel()
            assert held <= limit, f"keep {keep}: backward holds {held} elements, at most {limit} are needed"
            y.sum().backward()
            assert len(sent) == again, f"keep {keep}: x was gathered {len(sent)} times in backward"
    finally:
        ops.all_gather_flat = gather


# --- Tools that look inside an operator ---


def opcheck(me: Member, case: Case) -> None:
    """torch's own checks: schema, fake, autograd registration, tracing with symbolic shapes."""
    op, name = torch.ops.tileweave.all_gather_matmul, name_of(None)
    x, w, bias = _leaves(case, me.rank, me.device, "xwb")
    for args in ((x, w, None, name), (x, w, bias, name), (x, w, bias, name, True)):
        torch.library.opcheck(op.default, args)
    out = torch.empty(me.world_size * case.rows, case.cols, dtype=x.dtype, device=me.device)
    torch.library.opcheck(op.out, (x.detach(), w.detach(), bias.detach(), name), {"out": out})


def compiled_with_changing_rows(me: Member, case: Case, backend: str) -> None:
    """fullgraph, with rows that change from call to call: torch makes them symbolic."""
    torch._dynamo.reset()
    function = torch.compile(lambda x, w, b: tw.all_gather_matmul(x, w, b).relu(), fullgraph=True, backend=backend)
    for n, rows in enumerate((case.rows, case.rows + 3, case.rows + 8)):
        changed = Case(rows, case.cols, case.depth, case.dtype, case.bias)
        call = prepare(changed, me.rank, me.world_size, me.device, 30 + n)
        verify(function(call.x, call.w, call.bias), call.want.relu(), changed, f"rank {me.rank}, compiled, {changed}")


def column_parallel_linear(me: Member, case: Case, save_gathered: bool) -> None:
    """The module against torch.nn.Linear over the whole weight: outputs, gradients, state_dict."""
    from tileweave.nn import ColumnParallelLinear

    features = case.cols * me.world_size
    torch.manual_seed(5)
    whole = torch.nn.Linear(case.depth, features, bias=case.bias, dtype=torch.float64, device=me.device)
    part = ColumnParallelLinear(
        case.depth, features, bias=case.bias, device=me.device, dtype=case.torch_dtype, save_gathered=save_gathered
    )
    mine = slice(me.rank * case.cols, (me.rank + 1) * case.cols)
    shard = {name: tensor[mine].to(case.torch_dtype) for name, tensor in whole.state_dict().items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in part.state_dict().items()}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in shard.items()}
    part.load_state_dict(shard)

    calls = [draw_x(case, r, me.device, 6).double().requires_grad_() for r in range(me.world_size)]
    y_whole = whole(torch.cat(calls))
    x = calls[me.rank].detach().to(case.torch_dtype).requires_grad_()
    y = part(x)
    # relative to the largest: the weights were rounded to the dtype, the whole ones were not
    assert_near(y, y_whole[:, mine], case, f"rank {me.rank}: output")
    y_whole.square().mean().backward()
    (y.float().square().mean() / me.world_size).backward()  # the mean over all columns is the mean of the ranks' means
    assert_near(x.grad, calls[me.rank].grad, case, f"rank {me.rank}: gradient of x")
    for name, parameter in part.named_parameters():
        assert_near(parameter.grad, whole.get_parameter(name).grad[mine], case, f"rank {me.rank}: gradient of {name}")


def assert_near(got: torch.Tensor, want: torch.Tensor, case: Case, what: str) -> None:
    error = float((got.detach().double() - want.detach()).norm() / want.detach().norm())
    assert error < GRADIENT_ERROR[case.dtype], f"{what} is off by {error:.2e}"
