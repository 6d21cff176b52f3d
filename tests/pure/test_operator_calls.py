"""Which calls of an operator go around torch's dispatcher, and that these record the same
gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.profiler import profile
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tileweave.errors import UnsupportedError
from tileweave.ops.core.operator import Operator

TORCH, DIRECT = "by torch", "directly"


class Subclass(torch.Tensor):
    """A tensor whose functions others may want to see."""


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


class SeesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``scale(x, w, bias, factor, name)``, which says who called it in ``scale.called``."""
    found: Any = Operator("scale")
    found.called = []

    def implementation(x: Any, w: Any, bias: Any, factor: float, name: str) -> Any:
        found.called.append(DIRECT)
        return x.detach() * w.detach() * (1.0 if isinstance(factor, list) else factor), None

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, _, ctx.factor, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)

    def backward(ctx: Any, grad: Any, _: Any) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        return grad * w * ctx.factor, grad * x * ctx.factor, None, None, None

    def through_torch(*args: Any) -> tuple[str, None]:
        found.called.append(TORCH)
        return TORCH, None

    monkeypatch.setattr(
        torch.ops.tileweave, "scale", SimpleNamespace(default=through_torch), raising=False
    )
    found.define(implementation, implementation, implementation, backward, setup_context)
    return found


def call(operator: Operator, x: Any, w: Any, bias: Any = None, factor: Any = 2.0) -> Any:
    return operator(x, w, bias, factor, "group")[0]


def x_and_w() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(3), torch.randn(3)


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_plain_tensors_go_around_torch(
    scale: Any, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    x, w = x_and_w()
    with mode():
        y = call(scale, x, torch.nn.Parameter(w, requires_grad=False))
    assert scale.called == [DIRECT] and torch.equal(y, x * w * 2) and not y.requires_grad


@pytest.mark.parametrize(
    "listening",
    [SeesFunctions, SeesOperators, profile],
    ids=["function mode", "dispatch mode", "profiler"],
)
def test_what_listens_sees_the_operator(
    scale: Any, listening: Callable[[], AbstractContextManager[Any]]
) -> None:
    x, w = x_and_w()
    with listening():
        call(scale, x, w)
    call(scale, x, w)
    assert scale.called == [TORCH, DIRECT]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_transforms_and_tracers_see_the_operator(scale: Any) -> None:
    x, w = x_and_w()

    def traced(x: torch.Tensor) -> torch.Tensor:
        call(scale, x, w)
        return x + 1

    torch.vmap(traced)(x[None])
    torch.jit.trace(traced, (x,), check_trace=False)
    make_fx(traced)(x)
    assert scale.called == [TORCH] * 3
    with pytest.raises(UnsupportedError, match=r"the gradient of scale in a transform"):
        torch.func.grad(lambda x: traced(x).sum())(x)


@pytest.mark.parametrize(
    "strange",
    [
        lambda x: x.as_subclass(Subclass),
        lambda x: x.to("meta"),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: x.to_sparse(),
        lambda x: [[x]],
        lambda x: [x, x.to("meta")],
        lambda x: (x,),
        lambda x: b"no tensor",
    ],
    ids=["subclass", "meta", "negative view", "sparse", "list of lists", "list", "tuple", "bytes"],
)
def test_other_arguments_are_left_to_torch(
    scale: Any, strange: Callable[[torch.Tensor], Any]
) -> None:
    x, w = x_and_w()
    call(scale, x, strange(w))
    call(scale, strange(x), w)
    call(scale, x, w, strange(x))
    assert scale.called == [TORCH] * 3


def test_numbers_that_torch_converts_are_left_to_it(scale: Any) -> None:
    x, w = x_and_w()
    call(scale, x, w, None, np.float32(2))
    call(scale, "no tensor", w.tolist()[0])
    assert scale.called == [TORCH] * 2


def test_gradients_are_recorded_directly(scale: Any) -> None:
    x, w = (t.requires_grad_() for t in x_and_w())
    y = call(scale, x, w, None, 3.0)
    assert scale.called == [DIRECT] and "scale" in y.grad_fn.name()
    gx, gw = torch.autograd.grad(y.sum(), (x, w))
    assert torch.equal(gx, 3 * w) and torch.equal(gw, 3 * x)
    with torch.no_grad():
        assert not call(scale, x, w).requires_grad
    # below autograd, as in the implementation of another operator, torch records nothing
    with torch._C._AutoDispatchBelowAutograd():
        call(scale, x, w)
    assert scale.called == [DIRECT] * 2 + [TORCH]


def test_lists_go_around_torch(scale: Any) -> None:
    x, w = x_and_w()
    operands = x, w.requires_grad_()
    with torch.no_grad():
        call(scale, *operands, [x, operands[1]], [1, 2])
    assert scale.called == [DIRECT]
    y = call(scale, x, w.detach(), [x, operands[1]])
    assert scale.called == [DIRECT] * 2 and y.requires_grad


def products(x: Any, w: list[Any], bias: list[Any], cols: list[int], name: str) -> Any:
    """x * w_i, and the sum of x."""
    return [x.detach() * each.detach() for each in w], x.detach().sum()


@pytest.mark.parametrize("need_x", [False, True])
@pytest.mark.parametrize("alone", [False, True], ids=["a list and a tensor", "a tensor"])
def test_gradients_of_lists_are_nested_as_arguments_are(need_x: bool, alone: bool) -> None:
    """As torch.library nests flags and gradients. Some elements of lists have no gradient."""
    seen: list[Any] = []

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, *seen[:] = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *w)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, *w = ctx.saved_tensors
        seen[:] = ctx.needs_input_grad
        if alone:
            return grads[0] * w[0], [grads[0] * x, *[None] * 2], [], None, None
        of_w, of_sum = grads
        gx = sum(g * each for g, each in zip(of_w, w, strict=True) if g is not None) + of_sum
        return gx, [None if g is None else g * x for g in of_w], [], None, None

    def run(*args: Any) -> Any:
        found = products(*args)
        return found[0][0] if alone else found

    found = Operator("products")
    found.define(run, run, run, backward, setup_context)
    x, first = x_and_w()
    w = [first.requires_grad_(), torch.randn(3), torch.randn(3).requires_grad_()]
    result = found(x.requires_grad_(need_x), w, [], [1, 2], "group")
    inputs = [w[0], *([x] if need_x else [])]
    if alone:
        assert torch.equal(result, (x * w[0]).detach())
        gw, *gx = torch.autograd.grad(result.sum(), inputs)
        wanted = w[0]
    else:
        y, total = result
        assert type(y) is list and len(y) == 3 and y[1].requires_grad
        gw, *gx = torch.autograd.grad(y[0].sum() + 2 * y[1].sum() + total, inputs)
        wanted = w[0] + 2 * w[1] + 1
    assert torch.equal(gw, x)
    if need_x:
        torch.testing.assert_close(gx[0], wanted.detach())
    assert seen == [need_x, [True, False, True], [], False, False]


def test_operators_without_gradients_leave_those_to_torch(scale: Any) -> None:
    x, w = x_and_w()
    scale.define(*[scale._implementation[False]] * 3, None, None)
    call(scale, x, w.requires_grad_())
    call(scale, x, w.detach())
    assert scale.called == [TORCH, DIRECT]
