"""A toy operator, to show what an operator needs: this file, its kernel and its reference.

It is registered where this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from tests.support.toy_operator import reference
from tests.support.toy_operator.kernel import run

import tileweave as tw
from tileweave.bench.cases import Case, smoke_cases
from tileweave.bench.rivals import OURS, UNFUSED, Rivals
from tileweave.bench.run import BENCHED
from tileweave.bench.samples import Checked, DemoCase, Samples, Stressed, shapes
from tileweave.bench.subjects import Draw, Shape
from tileweave.errors import require
from tileweave.ops.core import collectives
from tileweave.ops.core.registration import register
from tileweave.ops.core.registry import group_of, name_of
from tileweave.ops.core.spec import BackwardOperator, OperatorSpec
from tileweave.planning.problem import Plan
from tileweave.profile.record import Recording, record_call

OP = "scale_all_reduce"
PLAN: Plan = Plan("fused", "a toy has one path")


def scale_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over ranks of x [m, n], times w [n], plus bias [n]; w and bias as on every rank."""
    name = name_of(group)
    if out is not None:
        torch.ops.tileweave.scale_all_reduce.out(x, w, bias, name, out=out)
        return out
    return torch.ops.tileweave.scale_all_reduce(x, w, bias, name)


def _check(x: torch.Tensor, w: torch.Tensor) -> None:
    fits = x.dim() == 2 and w.shape == x.shape[1:]
    require(fits, lambda: f"x {x.shape}, w {w.shape}", "[m, n] and [n]", "reshape them")


def _forward(x, w, bias, group_name, *, out=None):
    _check(x, w)
    y = torch.empty_like(x) if out is None else out
    run(x, w, bias, y, group_of(group_name))
    return y


def _fake(x, w, bias, group_name, *, out=None):
    _check(x, w)
    return torch.empty_like(x)


def _setup_context(ctx, inputs, output) -> None:
    _, w, _, ctx.group_name = inputs
    ctx.save_for_backward(w)


def _passed(ctx, grad):
    return grad, *ctx.saved_tensors, ctx.group_name


def _backward(grad, w, group_name, need_x, need_bias):
    total = collectives.all_reduce(grad, group_of(group_name))
    empty = grad.new_empty(0)
    return total * w if need_x else empty, total.sum(0) if need_bias else empty


def _like(grad, w, group_name):
    return torch.empty_like(grad), torch.empty_like(w)


def explain(x: torch.Tensor, w: torch.Tensor) -> Plan:
    """The path of a call."""
    _check(x, w)
    return PLAN


register(
    OperatorSpec(
        call=scale_all_reduce,
        arguments="Tensor x, Tensor w, Tensor? bias, str group_name",
        forward=_forward,
        fake=_fake,
        explain=explain,
        backward=BackwardOperator(
            arguments="Tensor grad, Tensor w, str group_name",
            of=("x", "bias"),
            setup_context=_setup_context,
            passed=_passed,
            run=_backward,
            like=_like,
        ),
        reference=reference.scale_all_reduce,
        kernel="tests.support.toy_operator.kernel",
        samples=__name__,
    )
)


# --- Samples ---


@dataclass(frozen=True)
class Operands:
    """Of one rank, and ``whole``, the sum over ranks."""

    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    whole: torch.Tensor

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[1]


class ScaleAllReduce:
    """A shape is (rows, columns, anything)."""

    op = OP
    options: ClassVar[dict[str, int]] = {}

    def draw(self, shape: Shape, draw: Draw) -> Operands:
        sizes = (shape.rows, shape.cols)
        xs = [draw.normal(sizes, 1.0, r) for r in draw.ranks]
        w, bias = draw.normal(sizes[1:], 1.0, 100), draw.biases(shape.cols, 101)
        return Operands(xs[draw.rank], w, bias, torch.stack(xs).float().sum(0))

    def call(
        self,
        operands: Operands,
        group: dist.ProcessGroup,
        out: torch.Tensor | None = None,
        second: bool = False,
    ) -> tuple[torch.Tensor, None]:
        o = operands
        return scale_all_reduce(o.x, o.w, o.bias, group=group, out=out), None

    def explain(self, operands: Operands, group: dist.ProcessGroup) -> Plan:
        return tw.explain(OP, operands.x, operands.w, group=group)

    def record(self, operands: Operands, group: dist.ProcessGroup) -> Recording:
        call: Callable[[], torch.Tensor] = lambda: self.call(operands, group)[0]  # noqa: E731
        return record_call(call, PLAN, operands.x.device, operands.x.nbytes, group)

    def error(self, operands: Operands, got: torch.Tensor, second: Any = None) -> float:
        want = operands.whole * operands.w.float()
        want = want if operands.bias is None else want + operands.bias.float()
        return float((got.float() - want).norm() / want.norm())


class ScaleAllReduceRivals(Rivals):
    def makers(self) -> dict[str, Any]:
        return {OURS: self.ours, UNFUSED: self.unfused}

    def unfused(self) -> Callable[[], object]:
        o = self.operands
        return lambda: reference.scale_all_reduce(o.x, o.w, None, self.group)

    def pushes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return []


SAMPLES = Samples(
    subject=ScaleAllReduce(),
    check_on_gpu=Checked(shapes((3, 8, 1)), shapes((1, 8, 1), (4, 8, 1)), shapes((4, 8, 1))),
    check_on_cpu=Checked(shapes((3, 8, 1)), shapes((1, 8, 1), (4, 8, 1))),
    stress_on_gpu=Stressed(shapes((3, 8, 1)), shapes((2, 8, 1))),
    stress_on_cpu=Stressed(shapes((3, 8, 1), (4, 8, 1)), shapes((2, 8, 1))),
    demo=lambda on_gpu, size: [DemoCase(OP, "a toy", Shape(3, 8, 1), torch.float32, bias=True)],
    bench=BENCHED,
    cases=[Case(OP, "toy", 64, 64, 1, False, "large")],
    smoke=smoke_cases(OP, (4, 8, 1), (3, 4, 1)),
    quick="toy",
    rival=ScaleAllReduceRivals,
    typical=((f"{OP} 64, 64", lambda size, machine: PLAN),),
)
