"""Which calls go around checks and plan, because an earlier one like them was accepted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.profiler import profile
from torch.overrides import TorchFunctionMode

from tileweave.errors import InputError, PeerTimeout
from tileweave.ops.core import registry
from tileweave.ops.matmul import inputs, known_calls
from tileweave.transport.workspace import CALL

X, W = torch.zeros(4, 8), torch.zeros(16, 8)
GROUP: Any = SimpleNamespace(group_name="g")
OPTIONS = (0, 1)


class Subclass(torch.Tensor):
    """A tensor whose functions others may want to see."""


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A group "g", in which a call of X and W was accepted with plan "plan". Returns the calls that
    are reported to peers."""
    found: list[Any] = []
    workspace = SimpleNamespace(accepted={})
    registered = SimpleNamespace(
        known=lambda name: GROUP if name == "g" else None,
        find=lambda *_: workspace,
        break_off=lambda *args: found.append(args[2:]),
    )
    for module in (known_calls, inputs, registry):
        monkeypatch.setattr(module, "REGISTRY", registered)
    monkeypatch.delenv("TILEWEAVE_DEBUG", raising=False)
    for shape in ((4, 8), (2, 2, 8)):  # only two dimensions are taken
        accepted, signature = inputs.signature_of(
            "op", "g", torch.zeros(shape), W, (None, None), OPTIONS
        )
        accepted[signature] = "plan"  # type: ignore[assignment]
    return found


def call(
    x: Any = X,
    w: Any = W,
    group: Any = GROUP,
    bias: Any = None,
    run: Any = None,
    out: Any = None,
    **changed: Any,
) -> Any:
    more: dict[str, Any] = {"op": "op", "options": OPTIONS, **changed}
    run = run or (lambda *args: args)
    args = more.pop("op"), run, group, x, w, (bias,), (out,), more.pop("options")
    return known_calls.call_again(*args, 7, **more)


@pytest.mark.parametrize("group", [GROUP, "g"], ids=["object", "name"])
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_call_like_an_accepted_one_runs(
    broken: list[Any], mode: Callable[[], AbstractContextManager[Any]], group: Any
) -> None:
    other = torch.nn.Parameter(torch.ones(16, 8), requires_grad=False)
    with mode():
        plan, name, x, w, bias, more, out = call(w=other, group=group)
    assert (plan, name, bias, more, out) == ("plan", "g", None, 7, None)
    assert x is X and w is other
    assert not broken


@pytest.mark.parametrize(
    "changed",
    [
        {"x": torch.zeros(5, 8)},
        {"x": torch.zeros(2, 2, 8)},
        {"x": X.bfloat16()},
        {"x": X.to("meta")},
        {"x": X.as_subclass(Subclass)},
        {"x": torch.zeros(4, 8, dtype=torch.complex64).conj().imag},
        {"x": X.to_sparse()},
        {"x": X.clone().requires_grad_()},
        {"x": "no tensor"},
        {"w": torch.zeros(16, 8).t().contiguous().t()},
        {"w": [W]},
        {"w": None},
        {"w": torch.nn.Parameter(W)},
        {"bias": torch.zeros(16)},
        {"bias": 0},
        {"op": "other"},
        {"options": (1, 1)},
        {"group": "another"},
        {"group": SimpleNamespace(group_name="g")},
        {"group": None},
        {"group": []},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_calls_that_differ_take_the_long_way(broken: list[Any], changed: Any) -> None:
    assert call() is not None
    assert call(**changed) is None


@pytest.mark.parametrize("listening", [SeesFunctions, profile, forward_ad.dual_level])
def test_what_listens_sees_the_operator(broken: list[Any], listening: Any) -> None:
    with listening():
        assert call() is None
    assert call() is not None


def test_autocast_debugging_and_compilers_take_the_long_way(
    broken: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.autocast("cpu"):
        assert call() is None
    with monkeypatch.context() as patch:
        patch.setenv("TILEWEAVE_DEBUG", "1")
        assert call() is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert call() is None
    assert torch.vmap(lambda x: x if call() is None else x + 1)(X).eq(X).all()
    assert call() is not None


def test_another_current_device_takes_the_long_way(
    broken: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_calls, "plain_on_gpu", lambda *_: True)
    monkeypatch.setattr(registry, "_current_device", lambda: 1)
    assert call() is None
    monkeypatch.setattr(registry, "_current_device", lambda: X.get_device())
    assert call() is not None


def test_results_in_memory_of_the_caller(broken: list[Any]) -> None:
    out = torch.zeros(4, 16)
    assert call(out=out) is None, "another signature than without"
    accepted, signature = inputs.signature_of("op", "g", X, W, (None, out), OPTIONS)
    accepted[signature] = "plan"  # type: ignore[assignment]
    before = out._version
    *_, given = call(out=out)
    assert given is out and out._version == before + 1
    assert call(out=out.clone().requires_grad_()) is None
    with torch.inference_mode():
        made_inside = torch.zeros(4, 16)
        assert call(out=made_inside)[-1] is made_inside
    assert call(out=made_inside) is None
    memory = torch.zeros(128)
    with pytest.raises(InputError, match="out= in the storage of an input"):
        call(x=memory[:32].view(4, 8), out=memory[64:].view(4, 16))
    assert len(broken) == 1


def test_rows_of_more_dimensions_where_the_operator_takes_them(
    broken: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = torch.arange(32.0).view(2, 2, 8)
    _, _, x, *_ = call(x=deep, flatten=True)
    assert torch.equal(x, deep.view(4, 8)) and x.data_ptr() == deep.data_ptr()
    assert call(x=deep) is None
    for other in (deep.transpose(0, 1), deep[:0], deep[0, 0], deep.repeat(2, 1, 1)):
        assert call(x=other, flatten=True) is None
    for size, taken in ((1, True), (2, True), (4, False)):  # 2 is a multiple of them, or not
        monkeypatch.setattr(GROUP, "size", lambda size=size: size, raising=False)
        assert (call(x=deep, flatten=True, divides=True) is not None) == taken
    assert known_calls.unflatten(torch.zeros(6, 3), deep).shape == (3, 2, 3)
    assert known_calls.unflatten(W, X) is W


def test_a_call_that_fails_is_reported(broken: list[Any]) -> None:
    def fail(error: BaseException, posted: bool) -> Callable[..., None]:
        def run(*_: Any) -> None:
            CALL.posted = posted
            raise error

        return run

    for error, posted in ((MemoryError(), True), (InputError(""), False), (KeyboardInterrupt(), 0)):
        with pytest.raises(type(error)):
            call(run=fail(error, bool(posted)))
        assert broken.pop() == (bool(posted), error) and not broken
    seen = PeerTimeout("op", 0, 1, 0, 1, 0, 30.0)  # peers know of it
    with pytest.raises(PeerTimeout):
        call(run=fail(seen, True))
    assert not broken
