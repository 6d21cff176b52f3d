"""What every operator does between torch and its implementation; devices are mocked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tileweave.errors import UnsupportedError  # noqa: E402
from tileweave.ops.core import registration, registry  # noqa: E402
from tileweave.ops.core.spec import BackwardOperator, OperatorSpec  # noqa: E402

SCHEMA = "op(Tensor[] tables, Tensor x, int[] sizes, str group_name, *, Tensor(a!) out) -> ()"


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Devices made current, starting from device 0."""
    found: list[Any] = []

    @contextmanager
    def device(wanted: Any) -> Iterator[None]:
        found.append(wanted)
        with monkeypatch.context() as inside:
            inside.setattr(registry, "_current_device", lambda: wanted)
            yield

    monkeypatch.setattr(registry, "_current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    return found


@pytest.mark.parametrize(
    ("on", "made_current"), [(0, []), (3, [3]), (-1, [])], ids=["current", "another", "CPU"]
)
def test_operator_runs_on_the_device_of_its_tensors(
    entered: list[Any], on: int, made_current: list[int]
) -> None:
    """A tensor on the CPU among others that are not is refused by the checks of the operator."""
    seen = []
    run = registry._as_given(
        SCHEMA, "cuda", lambda *args, out: seen.append((args, out, registry._current_device()))
    )
    x = SimpleNamespace(get_device=lambda: on, device=on)
    run([], x, [1, 2], "", out=7)
    assert entered == made_current
    assert seen == [(([], x, [1, 2], ""), 7, max(on, 0))], "once"


def test_schema_arguments() -> None:
    assert registry._arguments(SCHEMA) == [
        ["Tensor[]", "tables"],
        ["Tensor", "x"],
        ["int[]", "sizes"],
        ["str", "group_name"],
        ["Tensor(a!)", "out"],
    ]


# --- What is derived from a description ---


def described(passed: Any) -> OperatorSpec:
    """An operator of which y and the third argument have gradients; its backward operator is
    swiglu's, which stands in for one of its own."""

    def swiglu(*args: Any) -> None: ...

    backward = BackwardOperator(
        arguments="Tensor grad, Tensor y, Tensor offsets, int experts",
        of=("y", "bias"),
        setup_context=lambda ctx, inputs, output: None,
        passed=passed,
        run=lambda *args: (),
        like=lambda grad, y, offsets, experts: (torch.empty_like(y), grad.new_empty(3)),
    )
    return OperatorSpec(
        call=swiglu,
        arguments="Tensor y, Tensor offsets, Tensor? bias, str group_name",
        options="int experts=2, bool keep=False",
        forward=swiglu,
        fake=swiglu,
        explain=swiglu,
        reference=swiglu,
        kernel="",
        backward=backward,
    )


@pytest.fixture
def defined(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """What would be registered, by schema; the backward operator returns its flags, as numbers."""
    found: dict[str, tuple[Any, ...]] = {}
    monkeypatch.setattr(registration, "define", lambda schema, *rest: found.update({schema: rest}))
    run = SimpleNamespace(default=lambda *args: [float(flag) for flag in args[4:]])
    monkeypatch.setattr(torch.ops.tileweave, "swiglu_backward", run)
    monkeypatch.setattr(registration, "SPECS", {})
    return found


def test_schemas_follow_from_a_description(defined: dict[str, tuple[Any, ...]]) -> None:
    registration.register(described(lambda ctx, grad: None))
    common = "Tensor y, Tensor offsets, Tensor? bias, str group_name"
    assert list(defined) == [
        "swiglu_backward(Tensor grad, Tensor y, Tensor offsets, int experts, bool need_y,"
        " bool need_bias) -> (Tensor, Tensor)",
        f"swiglu({common}, int experts=2, bool keep=False) -> Tensor",
        f"swiglu.out({common}, *, Tensor(a!) out) -> ()",
    ]
    assert list(registration.SPECS) == ["swiglu"]
    names = "y offsets bias group_name experts keep"
    assert registration.SPECS["swiglu"].parameters == names.split()


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_gradients_are_put_where_their_arguments_are(
    defined: dict[str, tuple[Any, ...]], needs: tuple[bool, bool]
) -> None:
    registration.register(described(lambda ctx, grad: (grad, 1, 2, 3)))
    backward = next(rest[2] for schema, rest in defined.items() if schema.startswith("swiglu("))
    ctx = SimpleNamespace(needs_input_grad=(needs[0], False, needs[1], False, False, False))
    want = [1.0 if need else None for need in needs]
    with torch.no_grad():
        assert backward(ctx, "grad") == (want[0], None, want[1], None, None, None)
    with torch.enable_grad(), pytest.raises(UnsupportedError, match="create_graph"):
        backward(ctx, "grad")


def test_a_result_without_a_gradient_calls_nothing(defined: dict[str, tuple[Any, ...]]) -> None:
    registration.register(described(lambda ctx, grad: None))
    backward = next(rest[2] for schema, rest in defined.items() if schema.startswith("swiglu("))
    with torch.no_grad():
        assert backward(SimpleNamespace(needs_input_grad=(True,) * 6), None) == (None,) * 6


def test_the_fake_of_a_backward_is_empty_where_nothing_is_needed(
    defined: dict[str, tuple[Any, ...]],
) -> None:
    registration.register(described(lambda ctx, grad: None))
    fake = next(rest[1] for schema, rest in defined.items() if schema.startswith("swiglu_backward"))
    grad, y = torch.empty(4), torch.empty(2, 5)
    assert [tuple(g.shape) for g in fake(grad, y, None, 2, True, False)] == [(2, 5), (0,)]
    assert [tuple(g.shape) for g in fake(grad, y, None, 2, False, True)] == [(0,), (3,)]
