"""What calls of one shape share (launches, copies, views of slots) is made once, and not for calls
that need something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.pure.test_workspace import NotingTransport

from tileweave.kernels.runtime.peers import memory_of_parts
from tileweave.ops.core.registry import MOST_PARTS, parts_of_eager_calls
from tileweave.ops.experts import dispatch_grouped_matmul_fused as dispatch
from tileweave.ops.experts import route_tokens
from tileweave.ops.matmul import (
    all_gather_matmul_fused,
    inputs,
    matmul_all_reduce_fused,
    matmul_all_to_all_fused,
    matmul_reduce_scatter_fused,
    reduce_by_cublas,
)
from tileweave.ops.matmul.concurrent_gather import begin, gather_of
from tileweave.ops.matmul.cublas import gather_then_multiply
from tileweave.ops.matmul.exchange_launch import ExchangeLaunch, exchange_launch
from tileweave.ops.matmul.products import Plain, multiply
from tileweave.ops.matmul.reduce_by_cublas import multiply_then_reduce
from tileweave.ops.matmul.shards_by_cublas import shard_sums
from tileweave.planning.problem import MatmulConfig, Plan
from tileweave.planning.schedules.grouped import DispatchConfig
from tileweave.planning.schedules.scatter import Exchange
from tileweave.transport.workspace import Instance, Workspace

LIBRARY = MatmulConfig("library", "sm", 16, 32, 16, 1, 4)
TRITON = MatmulConfig("triton", "sm", 16, 16, 16, 1, 4, num_slices=2, num_producers=1)
DISPATCH = DispatchConfig("triton", 16, 16, 16, 1, 4)
ROWS_TO_COLUMNS = Exchange(0, 1)
HALF = torch.float16


def ones(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(rows, cols, dtype=dtype)


def exchanged(
    workspace: Workspace,
    rows: int = 8,
    dtype: torch.dtype = torch.float32,
    how: Exchange = ROWS_TO_COLUMNS,
    config: MatmulConfig = LIBRARY,
) -> object:
    return exchange_launch(workspace, "op", (rows, 8), dtype, how, config, True)


def reduced(
    workspace: Workspace,
    rows: int = 8,
    cols: int = 16,
    dtype: torch.dtype = torch.float32,
    own_rows: int = 4,
    config: MatmulConfig = LIBRARY,
) -> object:
    product = Plain(ones(cols, 8, dtype), None)
    return multiply_then_reduce(workspace, rows, product, "op", own_rows, config)[1]


def summed(
    workspace: Workspace, rows: int = 4, cols: int = 16, dtype: torch.dtype = torch.float32
) -> object:
    return shard_sums(workspace, "op", rows, Plain(ones(cols, 8, dtype), None))[1]


def gathered(workspace: Workspace, **x: Any) -> object:
    return gather_of(workspace, (ones(**{"rows": 4, "cols": 8, **x}),))[1]


def gathered_first(workspace: Workspace, config: MatmulConfig = LIBRARY, **x: Any) -> object:
    return gather_then_multiply(workspace, "op", (ones(**{"rows": 4, "cols": 8, **x}),), config)


def fused_gather(
    workspace: Workspace,
    cols: int = 16,
    how: Exchange | None = None,
    config: MatmulConfig = TRITON,
    **x: Any,
) -> object:
    x_of = ones(**{"rows": 16, "cols": 32, **x})
    w = ones(cols, x_of.shape[1] if how is None else 64, x_of.dtype)
    return all_gather_matmul_fused._fused_call(workspace, x_of, w, config, how, None)


def fused_exchange(
    workspace: Workspace,
    cols: int = 16,
    how: Exchange = ROWS_TO_COLUMNS,
    config: MatmulConfig = TRITON,
    **x: Any,
) -> object:
    x_of = ones(**{"rows": 16, "cols": 32, **x})
    w = ones(cols, x_of.shape[1], x_of.dtype)
    return matmul_all_to_all_fused._fused_call(workspace, x_of, w, how, config)


def exchanged_gather(workspace: Workspace, **changed: Any) -> object:
    return fused_gather(workspace, **{"how": ROWS_TO_COLUMNS, **changed})


def fused_sum(
    workspace: Workspace, cols: int = 16, config: MatmulConfig = TRITON, **x: Any
) -> object:
    x_of = ones(**{"rows": 32, "cols": 32, **x})
    w = ones(cols, x_of.shape[1], x_of.dtype)
    return matmul_reduce_scatter_fused.fused_call(workspace, x_of, w, x_of.dtype, config, None)


def one_shot(
    workspace: Workspace,
    cols: int = 16,
    pitch: int = 0,
    norm: bool = False,
    config: MatmulConfig = TRITON,
    **x: Any,
) -> object:
    """``pitch``: elements from row to row of x and of w beyond their columns."""
    x_of = ones(**{"rows": 8, "cols": 32, **x})
    rows, depth = x_of.shape
    x_of = ones(rows, depth + pitch % 10, x_of.dtype)[:, :depth]
    w = ones(cols, depth + pitch // 10, x_of.dtype)[:, :depth]
    return matmul_all_reduce_fused._one_shot(workspace, x_of, w, norm, config)[1]


WIDER, COARSER = replace(LIBRARY, tile_n=64), replace(TRITON, tile_n=32)
CASES: dict[str, tuple[Callable[..., object], dict[str, object]]] = {
    "exchange": (
        exchanged,
        {"rows": 16, "dtype": HALF, "how": ROWS_TO_COLUMNS.reverse, "config": WIDER},
    ),
    "sum": (reduced, {"rows": 16, "cols": 32, "dtype": HALF, "own_rows": 8, "config": WIDER}),
    "sum of shards": (summed, {"rows": 8, "cols": 32, "dtype": HALF}),
    "concurrent gather": (gathered, {"rows": 8, "cols": 16, "dtype": HALF}),
    "gather": (gathered_first, {"rows": 8, "cols": 16, "dtype": HALF, "config": WIDER}),
    "fused gather": (
        fused_gather,
        {"rows": 32, "cols": 32, "dtype": HALF, "how": ROWS_TO_COLUMNS, "config": COARSER},
    ),
    "exchange, then gather": (
        exchanged_gather,
        {"rows": 32, "cols": 32, "dtype": HALF, "how": ROWS_TO_COLUMNS.reverse, "config": COARSER},
    ),
    "fused sum": (fused_sum, {"rows": 64, "cols": 32, "dtype": HALF, "config": COARSER}),
    "one shot": (
        one_shot,
        {"rows": 16, "cols": 32, "dtype": HALF, "pitch": 8, "norm": True, "config": COARSER},
    ),
    "one shot, other w": (one_shot, {"pitch": 80}),
    "fused exchange": (
        fused_exchange,
        {
            "rows": 32,
            "cols": 32,
            "dtype": HALF,
            "how": ROWS_TO_COLUMNS.reverse,
            "config": COARSER,
        },
    ),
}


@pytest.mark.parametrize(("make", "others"), CASES.values(), ids=CASES)
def test_calls_share_what_is_made_for_them_alone(
    make: Callable[..., object], others: dict[str, object]
) -> None:
    workspace: Any = Workspace(NotingTransport(world_size=2))  # type: ignore[arg-type]
    calls: list[dict[str, Any]] = [{}, *({name: value} for name, value in others.items())]
    for changed in calls:  # growth of memory drops what was made before
        make(workspace, **changed)
    made = [make(workspace, **changed) for changed in calls]
    for number, changed in enumerate(calls):
        same = [other for other, one in zip(calls, made, strict=True) if one is made[number]]
        assert same == [changed], "calls that differ have the same"
        assert make(workspace, **changed) is made[number], f"{changed} is made again"


# Of a slot, with four ranks and the defaults above: what arrives from each peer, and where a kernel
# wants that, the own part or whole tiles. Symmetric memory is rounded up, which hides what lacks.
BYTES = {
    "exchange": 3 * (8 // 4 * 8) * 4,
    "sum": 3 * (4 * 16) * 4,
    "sum of shards": 4 * (4 * 16) * 4,
    "concurrent gather": 4 * (4 * 8) * 4,
    "gather": 3 * (4 * 8) * 4,
    "fused gather": 3 * (16 * 32) * 4,
    "exchange, then gather": 3 * (16 // 4 * 32) * 4,
    "one shot": 4 * (16 * 16) * 4,
    "fused exchange": 3 * (16 * 16) * 4,
}


@pytest.mark.parametrize("name", BYTES)
def test_slots_have_room_for_all_that_arrives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    reserve = Instance.reserve

    def noted(instance: Instance, slot_bytes: int, *more: int) -> None:
        asked.append(slot_bytes)
        reserve(instance, slot_bytes, *more)

    monkeypatch.setattr(Instance, "reserve", noted)
    CASES[name][0](Workspace(NotingTransport(world_size=4)))  # type: ignore[arg-type]
    assert asked == [BYTES[name]]


def test_every_rank_has_columns_of_an_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two shots each rank sums some columns. If two had none, they would send each other
    nothing, and not see that one is absent: then every rank sums all of them."""
    asked: list[int] = []
    monkeypatch.setattr(Instance, "reserve", lambda _, size, *more: asked.append(size))
    monkeypatch.setattr(reduce_by_cublas, "endpoint", lambda *_: None)
    monkeypatch.setattr(reduce_by_cublas, "launcher", lambda *_: None)
    for cols in (64, 48, 3, 2, 1):
        workspace: Any = Workspace(NotingTransport(world_size=4))  # type: ignore[arg-type]
        reduced(workspace, own_rows=8, cols=cols)
    two_shots = [3 * 2 * (8 * own) * 4 for own in (16, 12, 1)]
    assert asked == [*two_shots, *(4 * (8 * cols) * 4 for cols in (2, 1))]


def test_a_dispatch_has_room_for_the_tokens_of_all_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its launches are found again by whatever they are made for."""
    workspace: Any = Workspace(NotingTransport(world_size=4))  # type: ignore[arg-type]
    asked: list[int] = []
    marks: list[int] = []
    made: list[object] = []

    def launcher(*_: object) -> Callable[..., None]:
        made.append(object())
        return lambda *_: None

    monkeypatch.setattr(Instance, "reserve", lambda _, size, *more: asked.append(size))
    monkeypatch.setattr(Instance, "begin", lambda _, mark: marks.append(mark))
    monkeypatch.setattr(dispatch, "workspace_of", lambda *_: workspace)
    monkeypatch.setattr(dispatch, "endpoint", lambda *_: None)
    monkeypatch.setattr(dispatch, "_launcher", lambda _: launcher)

    def call(
        tokens: int = 64,
        topk: int = 2,
        experts: tuple[int, ...] = (2, 16, 32),
        x: torch.dtype = torch.float32,
        y: torch.dtype = torch.float32,
        config: DispatchConfig = DISPATCH,
        turned: bool = False,
    ) -> None:
        plan: Any = SimpleNamespace(
            world_size=4, rank=1, max_tokens=tokens, topk=topk, bound=8, fields=()
        )
        weights = torch.ones(experts, dtype=x)
        if turned:
            weights = weights.mT.contiguous().mT
        operands = torch.ones(tokens, experts[2], dtype=x), weights, plan, torch.ones(8, 8, dtype=y)
        dispatch.run_fused(*operands, "group", config, None)

    call()
    assert asked == [3 * 64 * 32 * 4]
    calls: list[dict[str, Any]] = [{}, {"tokens": 32}, {"topk": 1}, {"experts": (1, 16, 32)}]
    calls += [{"x": HALF}, {"y": HALF}, {"config": replace(DISPATCH, tile_n=32)}, {"turned": True}]
    for changed in calls[1:]:
        call(**changed)
    assert len(made) == len(calls), "calls that differ have the same launches"
    assert len(set(marks)) == 5, "ranks agree on tokens, choices, experts and the dtype of x"
    for changed in calls:
        call(**changed)
    assert len(made) == len(calls), "launches are made again"


@pytest.mark.parametrize("checksum", [0, 12345])
def test_a_concurrent_gather_is_compared(checksum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the checksum that is given, or else by that of what it sends: never by none."""
    transport: Any = NotingTransport(world_size=2)
    transport.push = lambda *_: None
    instance, call = gather_of(Workspace(transport), (ones(4, 8),))
    marks: list[int] = []
    monkeypatch.setattr(instance, "begin", lambda mark: bool(marks.append(mark)))
    begin(instance, call, (ones(4, 8),), checksum)
    other = gather_of(Workspace(transport), (ones(8, 8),))[1].checksum
    assert marks == [checksum or call.checksum] and 0 not in (other, *marks)
    assert other != call.checksum


def test_a_routing_has_room_for_the_choices_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Instance, "reserve", lambda _, size, *more: asked.append(size))
    monkeypatch.setattr(route_tokens, "endpoint", lambda *_: None)
    monkeypatch.setattr("tileweave.kernels.experts.routing.launcher", lambda *_: None)
    instance = Instance("op", NotingTransport(world_size=4))  # type: ignore[arg-type]
    route_tokens._routing_launcher(instance, 1, 1, 4, 100, 3, 2, None)
    assert asked == [4 * 100 * 3 * 4]


class Begun(Exception):
    """Raised in place of a call, with its checksum."""


BY_COPIES = {"transport": "copy_engine"}
CONFIGS = {
    "triton, sm": TRITON,
    "triton, copy_engine": replace(TRITON, **BY_COPIES),
    "library, sm": LIBRARY,
    "library, one shot": replace(LIBRARY, shots=1),
    "library, copy_engine": replace(LIBRARY, **BY_COPIES),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_call_is_compared_by_its_checksum(
    config: MatmulConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever path it takes: without it ranks whose calls differ would not find that."""

    def begin(_: Instance, mark: int = 0, *more: object) -> bool:
        raise Begun(mark)

    workspace: Any = Workspace(NotingTransport(world_size=2))  # type: ignore[arg-type]

    def chosen() -> inputs.Accepted:
        return inputs.Accepted("fused", "", config, 12345, 2, workspace=workspace)

    monkeypatch.setattr(Instance, "begin", begin)
    monkeypatch.setattr(Instance, "launched", lambda _: None)
    x, w, rows = ones(32, 32), ones(32, 32), ones(16, 32)
    calls: dict[str, Callable[[], object]] = {}
    if config.shots != 1:
        calls["gather"] = lambda: all_gather_matmul_fused.run_fused(
            x, w, None, ones(64, 32), None, "group", chosen()
        )
        calls["scatter"] = lambda: matmul_reduce_scatter_fused.run_fused(
            x, w, None, rows, "group", chosen()
        )
    if config.transport == "sm" or config.kernel == "triton":
        calls["exchange before"] = lambda: all_gather_matmul_fused.run_fused(
            x, ones(32, 64), None, rows, None, "group", chosen(), None, ROWS_TO_COLUMNS
        )
        calls["exchange after"] = lambda: matmul_all_to_all_fused.run_fused(
            x, w, None, ones(16, 64), ROWS_TO_COLUMNS, "group", chosen()
        )
    if config.transport == "sm":
        calls["all-reduce"] = lambda: matmul_all_reduce_fused.run_fused(
            rows, w, None, None, None, 0.0, rows, None, "group", chosen()
        )
    for name, call in calls.items():
        with pytest.raises(Begun) as found:
            call()
        assert found.value.args == (12345,), name


@pytest.mark.parametrize("biased", [False, True])
def test_a_matmul_into_memory_needs_no_autograd(biased: bool) -> None:
    """As in the implementation of another operator, where tensors still require gradients."""
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    bias, out = torch.ones(4) if biased else None, torch.empty(2, 4)
    with torch._C._AutoDispatchBelowAutograd():
        assert multiply(x, w, bias, out) is out
    assert out.tolist() == [[3.0 + biased] * 4] * 2 and not out.requires_grad


def test_parts_of_tiles_have_memory_after_what_a_call_uses_itself() -> None:
    instance = Workspace(NotingTransport(world_size=2)).instance("op", "sm")  # type: ignore[arg-type]
    parts = parts_of_eager_calls(instance, 100, after=1000)
    assert parts is not None and (parts.dtype, parts.numel()) == (torch.float32, 100)
    assert parts.data_ptr() - instance.scratch(1000).data_ptr() in range(1000, 2000)
    assert parts.data_ptr() % 16 == instance.scratch(1).data_ptr() % 16
    assert parts_of_eager_calls(instance, 0) is None
    assert parts_of_eager_calls(instance, MOST_PARTS // 4 + 1) is None


def test_a_launch_without_memory_for_parts_makes_its_own() -> None:
    out, given = ones(4, 4, HALF), ones(2, 2)
    assert memory_of_parts(given, 8, out) is given
    assert memory_of_parts(None, 0, out) is out
    own = memory_of_parts(None, 8, out)
    assert (own.dtype, own.numel()) == (torch.float32, 8)


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize(
    "fused",
    [all_gather_matmul_fused, matmul_reduce_scatter_fused, matmul_all_to_all_fused],
    ids=lambda module: module.OP,
)
def test_a_captured_call_has_memory_of_its_own(
    fused: Any, capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of eager calls share the memory where they add up parts of tiles."""
    given: list[Any] = []
    instance = SimpleNamespace(begin=lambda _: capturing, launched=lambda: None)
    call = SimpleNamespace(summed_in="kept")
    made = instance, (call, lambda *args: given.append(args[-1]))
    monkeypatch.setattr(fused, "ready", lambda *_: made)
    x, more = ones(4, 4), ()
    if fused is all_gather_matmul_fused:
        more = (None,)
    elif fused is matmul_all_to_all_fused:
        more = (ROWS_TO_COLUMNS,)
    fused.run_fused(x, x, None, x, *more, "group", Plan("fused", "", TRITON))
    assert given == [None if capturing else "kept"]


@pytest.mark.parametrize("capturing", [False, True])
def test_a_captured_product_has_memory_of_its_own(capturing: bool) -> None:
    sent: list[torch.Tensor] = []
    instance: Any = SimpleNamespace(begin=lambda _: capturing, launched=lambda: None)
    launch: Any = lambda product, _: sent.append(product)  # noqa: E731
    call = ExchangeLaunch(instance, launch, (4, 4), ones(4, 4))
    call.after_multiply(ones(4, 8), ones(4, 8), None, ones(4, 4), 0)
    assert sent[0].tolist() == [[8.0] * 4] * 4 and (sent[0] is call.kept) is not capturing
