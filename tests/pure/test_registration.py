"""What every operator does between torch and its implementation; devices are mocked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tileweave.ops.core import registry  # noqa: E402

SCHEMA = "op(Tensor[] tables, Tensor x, int[] sizes, str group_name, *, Tensor(a!) out) -> ()"


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Devices made current, starting from device 0."""
    found: list[Any] = []

    @contextmanager
    def device(wanted: Any) -> Iterator[None]:
        found.append(wanted)
        with monkeypatch.context() as inside:
            inside.setattr(torch.cuda, "current_device", lambda: wanted)
            yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
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
        SCHEMA, "cuda", lambda *args, out: seen.append((args, out, torch.cuda.current_device()))
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
