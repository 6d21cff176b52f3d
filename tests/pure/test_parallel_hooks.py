"""Hooks of parallelized modules: which arguments they change, which they refuse, and what is left
after a forward that raised; and the parts of a tensor that they take. Nothing is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tileweave.errors import InputError
from tileweave.nn import replicated
from tileweave.nn.shards import fits_weight
from tileweave.ops.core import replicated as parts_of_group
from tileweave.parallel import own_rows

X, MASK = torch.arange(24.0).view(1, 6, 4), torch.ones(1, 1, 6, 6)


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of two: a gather puts two copies of its rows together."""
    monkeypatch.setattr(own_rows, "group_of", lambda name: name)
    monkeypatch.setattr(own_rows.dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(own_rows, "own_part", lambda x, dim, _: x.chunk(2, dim)[1])
    monkeypatch.setattr(own_rows, "gather_parts", lambda x, dim, _: torch.cat([x, x], dim))


def equal(found: Any, wanted: Any) -> bool:
    return all(
        one is other or torch.equal(one, other) for one, other in zip(found, wanted, strict=True)
    )


def test_the_first_block_takes_own_rows_and_all_other_arguments() -> None:
    first, last = nn.Identity(), nn.Identity()
    hooks = own_rows.OwnRows([("a", first), ("b", last)], [], "group", 1)
    own = X[:, 3:]
    args, kwargs = hooks.begin(first, (X, MASK), {"mask": MASK})
    assert equal(args, (own, MASK)) and kwargs == {"mask": MASK}
    for name in ("hidden_states", "x"):
        args, kwargs = hooks.begin(first, (), {name: X, "mask": MASK, "position": 3})
        assert args == () and torch.equal(kwargs.pop(name), own)
        assert kwargs == {"mask": MASK, "position": 3}
    args, kwargs = hooks.begin(first, (), {"mask": MASK, "hidden_states": X})
    assert torch.equal(kwargs["hidden_states"], own) and kwargs["mask"] is MASK
    with pytest.raises(InputError, match="allowed: a multiple of 2"):
        hooks.begin(first, (X[:, :5],), {})
    for given in (((own, MASK), {}), ((), {"mask": MASK, "hidden_states": own})):
        assert hooks.sum_gradients(last, *given) == given
        assert torch.equal(hooks.end(last, (), own), torch.cat([own, own], 1))
    assert equal(hooks.end(last, (), (own, MASK)), (torch.cat([own, own], 1), MASK))
    for other in (own[:, :1], own[:, 0]):
        with pytest.raises(InputError, match="the rows of one rank; allowed: as many rows"):
            hooks.end(last, (), other)


def test_a_module_of_all_rows_gathers_one_tensor_alone() -> None:
    hooks = own_rows.AllRows("mixer", "it mixes rows", nn.Identity(), "group", 1)
    whole = torch.cat([X, X], 1)
    args, kwargs = hooks.begin(nn.Identity(), (X, MASK, 3), {"mask": MASK})
    assert equal(args[:2], (whole, MASK)) and args[2] == 3 and kwargs == {"mask": MASK}
    args, kwargs = hooks.begin(nn.Identity(), (), {"hidden_states": X, "mask": MASK})
    assert args == () and torch.equal(kwargs["hidden_states"], whole) and kwargs["mask"] is MASK
    for args, kwargs in (
        ((X, X.clone()), {}),
        ((X,), {"residual": X.clone()}),
        ((), {"hidden_states": X, "residual": X.clone()}),
    ):
        with pytest.raises(InputError, match="of the shape of its input"):
            hooks.begin(nn.Identity(), args, kwargs)
    trained = MASK.clone().requires_grad_()
    with pytest.raises(InputError, match="argument 'mask', which needs a gradient"):
        hooks.begin(nn.Identity(), (X,), {"mask": trained})
    with torch.no_grad():
        args, kwargs = hooks.begin(nn.Identity(), (X, X), {"mask": trained})
    assert equal(args, (whole, whole)) and kwargs["mask"] is trained


def test_parameters_are_dtensors_again_after_a_forward_that_raised() -> None:
    class Part(nn.Module):
        _sums_over = ""

        def __init__(self, sums_over: str = "") -> None:
            super().__init__()
            self._running, self._sums_over = replicated.Running(), sums_over

    class Parent(nn.Module):
        def __init__(self, *parts: nn.Module) -> None:
            super().__init__()
            self.parts = nn.ModuleList(parts)
            self.own = Part("group")

        def forward(self, fails: bool) -> list[int]:
            if fails:
                raise RuntimeError("no memory")
            return [part._running.forwards for part in (*self.parts, self.own)]  # type: ignore

    whole = Parent(Part(), Part("group"))
    replicated.plain_in_parents(whole)
    for fails in (True, False):
        if fails:
            with pytest.raises(RuntimeError, match="no memory"):
                whole(fails)
        else:
            assert whole(fails) == [1, 0, 1], "the sum of another module's child is not ours"
        parts: list[Any] = [*whole.parts, whole.own]
        assert [part._running.forwards for part in parts] == [0, 0, 0]


def test_a_deleted_parameter_is_no_attribute() -> None:
    get = replicated._getter("weight")
    with pytest.raises(AttributeError, match="weight"):
        get(SimpleNamespace(_parameters={}, _running=replicated.Running()))


def test_inputs_that_no_weight_fits_are_told() -> None:
    """Layers ask before they multiply, so that the error is theirs."""
    weight = torch.zeros(8, 4)
    assert fits_weight(torch.zeros(4), weight) and fits_weight(torch.zeros(2, 3, 4), weight)
    complex_numbers = torch.zeros(2, 4, dtype=torch.complex64)
    for x in (torch.tensor(1.0), torch.zeros(2, 8), complex_numbers, torch.zeros(4, device="meta")):
        assert not fits_weight(x, weight)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_are_equal_and_without_rest(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no rank takes would be lost without a word."""
    monkeypatch.setattr(parts_of_group, "group_of", lambda name: name)
    monkeypatch.setattr(
        parts_of_group.collectives, "all_gather", lambda x, _: torch.cat([x, x + 100, x + 200])
    )
    x = torch.arange(6.0 * 9 * 3).view(6, 9, 3)
    for rank in range(3):
        monkeypatch.setattr(parts_of_group, "rank_and_size", lambda _, rank=rank: (rank, 3))
        part = parts_of_group._own_part(x, dim, "group")
        assert torch.equal(part, x.chunk(3, dim)[rank]) and part.is_contiguous()
        assert parts_of_group._like_part(x, dim, "group").shape == part.shape
        whole = parts_of_group._gather_parts(part, dim, "group")
        assert torch.equal(whole, torch.cat([part, part + 100, part + 200], dim))
        like = parts_of_group._like_gathered(part, dim, "group")
        assert like.shape == whole.shape and like.stride() == whole.stride()
    alone = parts_of_group._gather_parts(x[:1, :1], dim, "group")  # sizes of 1 before others
    assert alone.stride() == torch.empty(alone.shape).stride()
    for function in (parts_of_group._own_part, parts_of_group._like_part):
        with pytest.raises(InputError, match="a multiple of the world size"):
            function(torch.zeros(7, 7, 7), dim, "group")
