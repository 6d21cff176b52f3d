"""What calls of one shape share (launches, copies, views of slots) is made once, and not for calls
that need something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.pure.test_workspace import NotingTransport

from tileweave.ops.matmul import (
    all_gather_matmul_fused,
    matmul_all_reduce_fused,
    matmul_all_to_all_fused,
    matmul_reduce_scatter_fused,
)
from tileweave.ops.matmul.concurrent_gather import begin, gather_of
from tileweave.ops.matmul.cublas import Plain, gather_then_multiply
from tileweave.ops.matmul.exchange_launch import exchange_launch
from tileweave.ops.matmul.reduce_by_cublas import multiply_then_reduce
from tileweave.ops.matmul.shards_by_cublas import shard_sums
from tileweave.planning.problem import MatmulConfig
from tileweave.planning.schedules.scatter import Exchange
from tileweave.transport.workspace import Workspace

LIBRARY = MatmulConfig("library", "sm", 16, 32, 16, 1, 4)
TRITON = MatmulConfig("triton", "sm", 16, 16, 16, 1, 4, num_slices=2, num_producers=1)
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
