"""Prepared launches of routing and dispatch: the driver gets what a first launch would give it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.compile import test_dispatch_kernels as kernels
from tests.compile.test_launch import FUNCTION, notes, parameters

from tileweave.kernels.experts.routing import launcher as routing_launcher
from tileweave.kernels.runtime import launch
from tileweave.kernels.runtime.peers import Peers
from tileweave.planning.schedules.grouped import DispatchConfig, RoutingCut

WORLD_SIZE, RANK, TOKENS, TOPK, EXPERTS, DEPTH, COLS = 4, 1, 64, 2, 4, 256, 320
SIZES = (RANK, WORLD_SIZE, TOKENS, TOPK, WORLD_SIZE * TOKENS * TOPK)
CUTS = [kernels.TRITON_CASES[1], kernels.HOPPER_CASES[2], kernels.ORDERED_CASES[0]]

__all__ = ["notes"]  # a fixture


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], launch.Prepared]]:
    """The arguments of each launch by Triton, and the launch prepared from it."""
    found: list[tuple[dict[str, Any], launch.Prepared]] = []
    prepare = launch.prepare

    def with_a_device(
        compiled: Any, programs: int, arguments: list[Any], *names: Any
    ) -> launch.Prepared | None:
        compiled.function = FUNCTION
        prepared = prepare(compiled, programs, arguments, *names)
        assert prepared is not None
        found.append((dict(zip(compiled.src.signature, arguments, strict=True)), prepared))
        return prepared

    monkeypatch.setattr(launch, "prepare", with_a_device)
    return found


def words(arguments: dict[str, Any]) -> dict[str, Any]:
    """Expected parameters of a launch with these arguments, apart from tensor maps."""
    found = launch._expand(arguments) | {"global_scratch": 0, "profile_scratch": 0}
    return {
        name: value.data_ptr() if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
        if not hasattr(value, "block_shape")
    }


def operands() -> tuple[Any, ...]:
    """x, experts, y, and the fields of a plan."""
    begins, sizes = kernels.layout_of(WORLD_SIZE, TOKENS, TOPK, EXPERTS)
    table = torch.zeros(begins[-1], dtype=torch.int32)
    fields = [table[begin : begin + n] for begin, n in zip(begins[:-1], sizes, strict=True)]
    x = torch.empty(TOKENS, DEPTH, dtype=torch.bfloat16)
    w = torch.empty(EXPERTS, COLS, DEPTH, dtype=torch.bfloat16)
    return x, w, torch.empty(SIZES[-1], COLS, dtype=torch.bfloat16), fields


def dispatch(
    peers: Peers, config: DispatchConfig, w: torch.Tensor
) -> Callable[..., torch.Tensor | None]:
    module: Any = kernels.plain if config.kernel == "triton" else kernels.hopper
    module = kernels.ordered if config.ordered else module
    return module.launcher(peers, config, *SIZES, w, 132)


@pytest.mark.parametrize("config", CUTS, ids=repr)
def test_a_dispatch_is_launched_again_with_what_changed(
    notes: SimpleNamespace, given: list[tuple[dict[str, Any], launch.Prepared]], config: Any
) -> None:
    first, second = operands(), operands()
    x, w, y, fields = second
    peers = kernels.endpoint(3 * TOKENS * DEPTH, torch.bfloat16)
    again, fresh = dispatch(peers, config, w), dispatch(peers, config, w)
    kept = again(*first)
    assert not notes.launches, "the first one is Triton's"
    maps = len(notes.maps)
    rows = again(*second)
    assert (len(notes.launches), len(given)) == (1, 1)
    changed, maps = dict(notes.maps[maps:]), len(notes.maps)
    seen = parameters(given[0][1], notes.launches[-1][2])
    fresh_rows = fresh(*second)
    wanted, expected = words(given[1][0]), dict(notes.maps[maps:])
    maps_of = {"rows_desc", "w_desc", "y_desc"} & set(seen)
    allocated = {"placement.rows", "placement.placed"} & set(seen)  # allocated in each call
    compared = set(seen) - maps_of - allocated
    assert {name: seen[name] for name in compared} == {name: wanted[name] for name in compared}
    assert (len(maps_of), len(allocated)) == (len(given[0][1]._tables), 2 * config.ordered)
    if config.kernel == "hopper":
        for operand in (w, y):
            assert changed[operand.data_ptr()] == expected[operand.data_ptr()]
    if config.ordered:
        assert kept is not None and rows is not None and fresh_rows is not None
        assert changed[rows.data_ptr()] == expected[fresh_rows.data_ptr()]
        assert seen["placement.rows"] == rows.data_ptr() != kept.data_ptr()
    odd = torch.empty(SIZES[-1] * COLS + 1, dtype=torch.bfloat16)[1:].view(SIZES[-1], COLS)
    again(x, w, odd, fields)
    assert (len(notes.launches), len(given)) == (1, 3), "other alignment, other code"


@pytest.mark.parametrize("cut", [kernels.ONE_LAUNCH, kernels.SORT], ids=repr)
def test_a_routing_plan_is_launched_again_with_what_changed(
    notes: SimpleNamespace, given: list[tuple[dict[str, Any], launch.Prepared]], cut: RoutingCut
) -> None:
    peers = kernels.endpoint(WORLD_SIZE * TOKENS * TOPK, torch.int32)
    begins, _ = kernels.layout_of(WORLD_SIZE, TOKENS, TOPK, EXPERTS)
    again, fresh = (
        routing_launcher(peers, cut, begins, TOKENS, TOPK, EXPERTS, RANK, WORLD_SIZE, 132)
        for _ in range(2)
    )
    calls = [
        (torch.zeros(n, TOPK, dtype=torch.int64), torch.zeros(begins[-1], dtype=torch.int32), n)
        for n in (TOKENS, 33)
    ]
    again(*calls[0])
    assert not notes.launches and len(given) == cut.launches
    again(*calls[1])
    assert len(notes.launches) == cut.launches
    fresh(*calls[1])
    for number in range(cut.launches):
        seen = parameters(given[number][1], notes.launches[number][2])
        wanted = words(given[cut.launches + number][0])
        assert seen == {name: wanted[name] for name in seen} and seen["tokens"] == 33
