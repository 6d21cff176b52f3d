"""Shared by CPU and GPU tests: what users of an operator rely on besides its numbers."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.fork_server import server
from tests.support.matmul_cases import (
    AG,
    AR,
    EPS,
    IN,
    RS,
    Call,
    Case,
    Operands,
    draw_operands,
    prepare,
    verify,
)
from tests.support.tolerances import GRADIENT_ERROR, IN_RANK_ORDER, TO_ADD, assert_norm_near
from tests.support.worlds import ROOT, Member, environment_for

import tileweave as tw
from tileweave.nn import ColumnParallelLinear, RowParallelLinear
from tileweave.nn.shards import local
from tileweave.ops import reference
from tileweave.ops.core import collectives
from tileweave.ops.core.registry import name_of
from tileweave.planning import choices
from tileweave.planning.problem import MatmulConfig
from tileweave.transport.workspace import REGISTRY

# --- The public call ---


def invoke(
    case: Case, operands: Operands, **options: object
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the public function with these operands. Return its result, and the second one if there
    is one."""
    if case.gathered:
        options["return_gathered"] = True
    result = getattr(tw, case.op)(
        operands.x, operands.w, operands.bias, **operands.options(), **case.options(), **options
    )
    return result if isinstance(result, tuple) else (result, None)


def results_of(call: Call) -> dict[str, torch.Tensor]:
    """Memory for the results of the call, as keyword arguments."""
    return (
        {"out": call.out} if call.second is None else {"out": call.out, "residual_out": call.second}
    )


def public_calls(me: Member, cases: list[Case], path: str | None) -> None:
    """The operator with its own plan, and with each way to ask for results. ``path``: that of the
    plan; None: either."""
    for number, case in enumerate(cases):
        into = prepare(replace(case, gathered=False), me.rank, me.world_size, me.device, number)
        plan = tw.explain(case.op, into.x, into.w, **case.options())
        assert path in (None, plan.path), f"{case}: {plan}"
        back, _ = invoke(into.case, into.operands, **results_of(into))
        assert back is into.out, "out= is what comes back"
        into.verify(f"rank {me.rank}, out=")
        for asked in [case, replace(case, gathered=not case.gathered)] if case.op == AG else [case]:
            call = prepare(asked, me.rank, me.world_size, me.device, number)
            y, second = invoke(asked, call.operands)
            call.verify(f"rank {me.rank}, returned", y, second)
            if asked.gathered:
                assert second.data_ptr() != call.x.data_ptr(), (
                    "the gathered input has memory of its own"
                )
            o = call.operands
            found = getattr(reference, case.op)(
                o.x, o.w, o.bias, dist.group.WORLD, **o.options(), **case.options()
            )
            y, second = found if isinstance(found, tuple) else (found, None)
            call.verify(
                f"rank {me.rank}, the reference itself",
                y,
                second if asked.gathered or asked.norm else None,
            )


def same_bits_twice(me: Member, case: Case) -> None:
    """Make the same call twice: results are bit-equal on this rank, and replicated results are
    bit-equal on all ranks."""
    operands = draw_operands(case, me.rank, me.world_size, me.device, 8)
    first, second = invoke(case, operands)
    for _ in range(3):
        again, again_second = invoke(case, operands)
        assert torch.equal(first, again), f"rank {me.rank}: other bits the second time"
        assert second is None or torch.equal(second, again_second), (
            f"rank {me.rank}: other bits in the second result"
        )
    if case.op == AR:
        everyone = collectives.all_gather(first, dist.group.WORLD).view(me.world_size, *first.shape)
        assert all(torch.equal(everyone[0], other) for other in everyone), (
            "ranks hold different bits of one result"
        )


def sums_in_rank_order(me: Member, op: str, config: MatmulConfig) -> None:
    """Of three ranks."""
    x, w = TO_ADD[me.rank].expand(4 * me.world_size, -1).contiguous(), torch.eye(3)
    with choices.forced(op, config):
        for _ in range(2):  # once with each slot
            y = getattr(tw, op)(x, w)
            assert y.tolist() == [IN_RANK_ORDER] * len(y), f"rank {me.rank}: {y[0].tolist()}"


def public_calls_in_a_subgroup(me: Member, members: list[int], case: Case) -> None:
    """Pass the group as an object and by name."""
    group = me.group(*members)
    if group is not None:
        call = prepare(case, dist.get_rank(group), len(members), me.device, 5)
        for given in (group, name_of(group)):
            y, second = invoke(case, call.operands, group=given)
            call.verify(f"rank {me.rank} of the world in {members}", y, second)
    me.barrier()


def many_dimensions(me: Member, case: Case) -> None:
    """x [m, a, b, K] gives y [..., a, b, n]. Dimension 0 is gathered, scattered or unchanged."""
    call = prepare(case, me.rank, me.world_size, me.device, 3)
    size, x_rows = me.world_size, case.x_rows(me.world_size)
    for split in ((2, 3), (2,), (1,), (1, 2, 1)):
        inner = torch.Size(split).numel()
        lead = (x_rows // inner, *split)
        total = (case.out_rows(size) // inner, *split)
        cols = case.out_cols(size)
        o = replace(call.operands, x=call.x.view(*lead, case.x_cols(size)))
        if o.residual is not None:
            o.residual = o.residual.view(*total, case.cols)
        y, second = invoke(case, o)
        assert y.shape == (*total, cols), f"x {tuple(o.x.shape)} gave y {tuple(y.shape)}"
        if second is not None:
            width = case.depth if case.gathered else case.cols
            assert second.shape == (*total, width), (
                f"x {tuple(o.x.shape)} gave a second {tuple(second.shape)}"
            )
            second = second.reshape(-1, width)
        call.verify(f"x {tuple(o.x.shape)}", y.reshape(-1, cols), second)
        results = {
            name: torch.full_like(t, float("nan")).view(*total, -1)
            for name, t in results_of(call).items()
        }
        if case.op == AG:
            results = {"out": results["out"]}
        invoke(replace(case, gathered=False), o, **results)
        second = results["residual_out"].view(-1, case.cols) if case.norm else None
        call.verify(f"x {tuple(o.x.shape)}, out=", results["out"].view(-1, cols), second)


def empty_dimensions(
    me: Member, dtype: str, op: str = AG, how: tuple[int, int] | None = None
) -> None:
    """A size of zero is no error: there is nothing to multiply, or nothing to add to the bias."""
    for rows, cols, depth in ((0, 8, 16), (4, 0, 16), (4, 8, 0), (0, 0, 0)):
        case = Case(
            rows, cols, depth, dtype, bias=True, integers=True, gathered=op == AG, op=op, how=how
        )
        call = prepare(case, me.rank, me.world_size, me.device, 2)
        call.verify(f"rank {me.rank}", *invoke(case, call.operands))


def close_frees_at_once(me: Member, case: Case) -> None:
    """Nothing is left to the garbage collector. It may run while a graph is captured, which fails
    in torch."""
    call = prepare(case, me.rank, me.world_size, me.device, 8)
    call.verify("before", tw.all_gather_matmul(call.x, call.w, call.bias))
    workspace = REGISTRY.find(name_of(None), me.device)
    assert workspace is not None and workspace.instances, "the call was a fused one"
    held = [weakref.ref(instance.slots) for instance in workspace.instances.values()]
    del workspace
    gc.disable()
    try:
        tw.close()
        assert not any(reference() is not None for reference in held), (
            "slots outlive their workspace"
        )
    finally:
        gc.enable()
    me.barrier()


def weight_in_a_larger_tensor(me: Member, case: Case) -> None:
    """Rows of w need not be adjacent: a slice of a fused weight works without a copy. w may also be
    contiguous along its other dimension."""
    call = prepare(case, me.rank, me.world_size, me.device, 4)
    cols, depth = call.w.shape
    wide = torch.full((cols, depth + 24), float("nan"), dtype=case.torch_dtype, device=me.device)
    wide[:, 8 : 8 + depth] = call.w
    call.verify(
        "w with a row stride", *invoke(case, replace(call.operands, w=wide[:, 8 : 8 + depth]))
    )
    if case.op != "matmul_all_reduce":
        turned = torch.full(
            (depth, cols + 24), float("nan"), dtype=case.torch_dtype, device=me.device
        )
        turned[:, 8 : 8 + cols] = call.w.t()
        call.verify(
            "w the other way round",
            *invoke(case, replace(call.operands, w=turned[:, 8 : 8 + cols].t())),
        )


# --- Bad input ---


def check_refusal(
    me: Member,
    op: str,
    shapes: dict[str, tuple[int, ...] | None],
    pattern: str,
    options: dict[str, int] | None = None,
) -> None:
    """One rank calls with zeros of these shapes, and the others do not call. The error must be
    found before anything is sent."""
    if me.rank == me.world_size - 1:
        tensors = {
            name: None if shape is None else torch.zeros(shape, device=me.device)
            for name, shape in shapes.items()
        }
        with pytest.raises(tw.InputError, match=f"(?s){pattern}") as caught:
            getattr(tw, op)(**tensors, **(options or {}))
        text = str(caught.value)
        parts = [text.index(part) for part in ("asked: ", "allowed: ", "remedy: ")]
        assert parts == sorted(parts), text
    tw.close()  # else peers would learn that this rank refused its call


def check_alias_is_refused(
    me: Member,
    op: str,
    x: tuple[int, ...],
    w: tuple[int, ...],
    out: tuple[int, ...],
    options: dict[str, int] | None = None,
) -> None:
    """A result that shares the storage of an input."""
    if me.rank == me.world_size - 1:
        memory = torch.zeros(1024, device=me.device)
        inputs = [memory[: torch.Size(shape).numel()].view(shape) for shape in (x, w)]
        with pytest.raises(tw.InputError, match="memory of its own"):
            getattr(tw, op)(
                *inputs,
                out=memory[512 : 512 + torch.Size(out).numel()].view(out),
                **(options or {}),
            )
    tw.close()


def mismatch_error(me: Member, op: str, options: dict[str, int] | None = None) -> str:
    """With TILEWEAVE_DEBUG=1, rank 1 passes another weight. Check the error of every rank."""
    x, w = (
        torch.zeros(n, 64, device=me.device)
        for n in (4 * me.world_size, 33 if me.rank == 1 else 32)
    )
    with (
        mock.patch.dict(os.environ, TILEWEAVE_DEBUG="1"),
        pytest.raises(tw.RankMismatchError) as caught,
    ):
        getattr(tw, op)(x, w, **(options or {}))
    return str(caught.value)


# --- Tools that look inside an operator ---


def opcheck(me: Member, case: Case) -> None:
    """Run torch.library.opcheck: schema, fake, autograd registration and tracing with symbolic
    shapes."""
    op, name = getattr(torch.ops.tileweave, case.op), name_of(None)
    operands = draw_operands(case, me.rank, me.world_size, me.device, 77)
    x, w, bias, residual, norm_weight = (
        None if t is None else t.requires_grad_() for t in vars(operands).values()
    )
    variants: list[tuple[object, ...]] = [(None,), (bias,)]
    tails: list[tuple[object, ...]] = [(name,)]
    if case.how is not None:
        tails = [(*case.how, name)] if case.op != IN else [(*case.how, name, True)]
    elif case.op == AG:
        tails.append((name, True))
    elif case.op == AR:
        tails = [
            (None, None, EPS, name),
            (residual, None, EPS, name),
            (residual, norm_weight, EPS, name),
        ]
    for head in variants:
        for tail in tails:
            torch.library.opcheck(op.default, (x, w, *head, *tail))
    out = torch.empty(
        case.out_rows(me.world_size), case.out_cols(me.world_size), dtype=x.dtype, device=me.device
    )
    detached = [None if t is None else t.detach() for t in (x, w, bias, residual, norm_weight)]
    if case.op != AR:
        torch.library.opcheck(op.out, (*detached[:3], *(case.how or ()), name), {"out": out})
        return
    torch.library.opcheck(
        op.out, (*detached[:3], None, None, EPS, name), {"out": out, "residual_out": None}
    )
    kept = torch.empty_like(out) if case.norm else None
    torch.library.opcheck(op.out, (*detached, EPS, name), {"out": out, "residual_out": kept})


def compiled_with_changing_rows(me: Member, case: Case, backend: str) -> None:
    """Compile with fullgraph and a number of rows that changes from call to call: torch makes it
    symbolic."""
    torch._dynamo.reset()
    operator = getattr(tw, case.op)
    function = torch.compile(
        lambda x, w, b: operator(x, w, b, **case.options()).relu(), fullgraph=True, backend=backend
    )
    for n, rows in enumerate((case.rows, case.rows + 3, case.rows + 8)):
        changed = replace(case, rows=rows)
        call = prepare(changed, me.rank, me.world_size, me.device, 30 + n)
        verify(
            function(call.x, call.w, call.bias),
            call.want.relu(),
            changed,
            f"rank {me.rank}, compiled, {changed}",
        )


# --- Modules ---


def column_parallel_linear(me: Member, case: Case, save_gathered: bool) -> None:
    """Compare the module with torch.nn.Linear over the whole weight: outputs, gradients,
    state_dict."""
    # for outputs, too: the weights were rounded to the dtype, those of the whole layer were not
    limit = GRADIENT_ERROR[case.dtype]
    features = case.cols * me.world_size
    whole = _whole_linear(me, case.depth, features, case.bias)
    rounded = _rounded(whole, case)
    part = ColumnParallelLinear.from_linear(rounded, save_gathered=save_gathered)
    mine = slice(me.rank * case.cols, (me.rank + 1) * case.cols)
    _check_state(part, rounded)

    shards = [draw_operands(case, r, me.world_size, me.device, 6).x for r in range(me.world_size)]
    leaves = [shard.double().requires_grad_() for shard in shards]
    y_whole = whole(torch.cat(leaves))
    x = shards[me.rank].clone().requires_grad_()
    y = part(x)
    assert_norm_near(y, y_whole[:, mine], limit, f"rank {me.rank}: output")
    y_whole.square().mean().backward()
    # the mean over all columns is the mean of the means of all ranks
    (y.float().square().mean() / me.world_size).backward()
    assert_norm_near(x.grad, leaves[me.rank].grad, limit, f"rank {me.rank}: gradient of x")
    for name, parameter in part.named_parameters():
        assert_norm_near(
            local(parameter.grad),
            whole.get_parameter(name).grad[mine],
            limit,
            f"rank {me.rank}: gradient of {name}",
        )


def row_parallel_linear(me: Member, case: Case) -> None:
    """Compare the module with torch.nn.Linear over the whole weight, with scattered rows (RS) or
    without (AR)."""
    limit = GRADIENT_ERROR[case.dtype]
    size, features = me.world_size, case.depth * me.world_size
    whole = _whole_linear(me, features, case.cols, case.bias)
    rounded = _rounded(whole, case)
    part = RowParallelLinear.from_linear(rounded, scatter=case.op == RS)
    mine = slice(me.rank * case.depth, (me.rank + 1) * case.depth)
    _check_state(part, rounded)

    shards = [draw_operands(case, r, size, me.device, 6).x for r in range(size)]
    leaves = [shard.double().requires_grad_() for shard in shards]
    y_whole = whole(torch.cat(leaves, dim=1))
    x = shards[me.rank].clone().requires_grad_()
    y = part(x)
    rows = slice(me.rank * case.rows, (me.rank + 1) * case.rows) if case.op == RS else slice(None)
    assert_norm_near(y, y_whole[rows], limit, f"rank {me.rank}: output")
    y_whole.square().mean().backward()
    (y.float().square().mean() / (size if case.op == RS else 1)).backward()
    assert_norm_near(x.grad, leaves[me.rank].grad, limit, f"rank {me.rank}: gradient of x")
    assert_norm_near(
        local(part.weight.grad),
        whole.weight.grad[:, mine],
        limit,
        f"rank {me.rank}: gradient of weight",
    )
    if case.bias:
        assert_norm_near(
            local(part.bias.grad), whole.bias.grad, limit, f"rank {me.rank}: gradient of bias"
        )


def _whole_linear(me: Member, inputs: int, outputs: int, bias: bool) -> torch.nn.Linear:
    torch.manual_seed(5)
    return torch.nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64, device=me.device)


def _rounded(linear: torch.nn.Linear, case: Case) -> torch.nn.Linear:
    return copy.deepcopy(linear).to(case.torch_dtype)


def _check_state(part: torch.nn.Module, whole: torch.nn.Linear) -> None:
    """A state_dict of DTensors with the names and values of ``whole``, which can be loaded
    again."""
    want = whole.state_dict()

    def check() -> None:
        state = part.state_dict()
        assert state.keys() == want.keys()
        assert all(torch.equal(state[name].full_tensor(), want[name]) for name in want)

    check()
    torch.nn.init.zeros_(local(part.weight.detach()))
    part.load_state_dict(want)
    check()


# --- Examples ---


def run_example(
    name: str,
    *words: str,
    on_gpu: bool,
    code: int = 0,
    seconds: float = 110.0,
    fresh: bool = False,
) -> str:
    """Run ``python examples/<name> <words>``, which must exit with ``code``. Return its output, or
    its errors if there is no output. ``fresh``: also on the CPU in a process that has imported
    nothing, which takes seconds."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("TILEWEAVE_", "TRITON_INTERPRET"))
    }
    environment = {**kept, "PYTHONPATH": str(ROOT / "src")}
    if not on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [str(ROOT / "examples" / name), *words]
    if not (on_gpu or fresh) and sys.platform == "linux":
        ended, out, err = run_in_fork(environment, command, seconds=seconds)[0]
    else:
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        ended, out, err = done.returncode, done.stdout, done.stderr
    assert ended == code, f"exit code {ended}\n{out}\n{err}"
    return out or err


def run_in_fork(
    environment: Mapping[str, str],
    words: Sequence[str],
    ranks: int = 1,
    seconds: float = 110.0,
) -> list[tuple[int, str, str]]:
    """``python *words`` with interpreted kernels, in forks of the server of ranks: (exit code,
    output, errors) of each of ``ranks``, which have the variables of torchrun if there are more."""
    with ExitStack() as files:
        kept, running = [], []
        for rank in range(ranks):
            kept.append([files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)])
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            each = {**environment, **(place if ranks > 1 else {})}
            running.append(server(environment_for("gloo", {})).script(each, words, *kept[-1]))
        ended = [one.wait(seconds) for one in running]
        for one in itertools.chain(*kept):
            one.seek(0)
        return [(end, *(one.read() for one in pair)) for end, pair in zip(ended, kept, strict=True)]
