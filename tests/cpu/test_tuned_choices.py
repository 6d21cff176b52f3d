"""Plans by tuned results: all ranks plan by the same ones, whatever files they have."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.calls import refusal
from tests.support.worlds import Member, Worlds

import tileweave as tw
from tileweave.ops.core import tuned_choices
from tileweave.planning import cache, choices
from tileweave.planning.measurements import Measurement
from tileweave.planning.problem import MatmulConfig, Problem

CONFIG = MatmulConfig("triton", "sm", 16, 32, 32, 1, 4, num_slices=2, num_producers=1)
OTHER = replace(CONFIG, tile_k=16)
ROWS, COLS, DEPTH = 8, 24, 32
OP = "all_gather_matmul"


def tuned(size: int, config: MatmulConfig | None, us: float = 5.0) -> Measurement:
    times = {None: 7.0, config: us}
    return Measurement(OP, Problem(size, ROWS, COLS, DEPTH, 4, "float32"), times)


@contextmanager
def cache_of(folder: Path, **variables: str) -> Iterator[None]:
    """A process that has read no cache, with one in ``folder``. Collective."""

    def forget() -> None:
        choices.clear()
        tuned_choices._HELD.clear()
        tuned_choices._MET.clear()
        tw.close()
        dist.barrier()

    forget()
    try:
        with mock.patch.dict(os.environ, {"TILEWEAVE_CACHE": str(folder), **variables}):
            yield
    finally:
        forget()


def call(me: Member, group: dist.ProcessGroup | None = None) -> tuple[str, float]:
    """The plan of a call after it was made, and the error of its result."""
    size = dist.get_world_size(group)
    xs = [torch.randn(ROWS, DEPTH, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    w = torch.randn(COLS, DEPTH, generator=torch.Generator().manual_seed(99))
    x = xs[dist.get_rank(group)]
    y = tw.all_gather_matmul(x, w, group=group)
    want = torch.cat(xs) @ w.t()
    return str(tw.explain(OP, x, w, group=group)), ((y - want).norm() / want.norm()).item()


def write(folder: Path, size: int, entry: Measurement) -> None:
    with mock.patch.dict(os.environ, TILEWEAVE_CACHE=str(folder)):
        cache.merge(tuned_choices.key_of(torch.device("cpu"), size), [entry])


def differing(me: Member, root: str, configs: list[MatmulConfig | None]) -> tuple[str, float]:
    folder = Path(root) / str(me.rank)
    if configs[me.rank] is not None:
        write(folder, me.world_size, tuned(me.world_size, configs[me.rank]))
    with cache_of(folder):
        return call(me)


def test_all_ranks_plan_by_the_results_of_rank_0(worlds: Worlds, tmp_path: Path) -> None:
    for number, configs in enumerate(([CONFIG, OTHER, None], [CONFIG] * 3, [None, OTHER, OTHER])):
        found = worlds("gloo", 3).run(differing, str(tmp_path / str(number)), configs)
        assert all(error < 1e-5 for _, error in found)
        plans = {plan for plan, _ in found}
        assert len(plans) == 1, plans
        measured = plans.pop().endswith(": measured")
        assert measured == (configs[0] is not None)


def unfused_wins(me: Member, root: str) -> tuple[str, float]:
    if me.rank == 0:
        write(Path(root), me.world_size, tuned(me.world_size, None, 3.0))
    me.barrier()
    with cache_of(Path(root)):
        return call(me)


def test_calls_run_unfused_where_that_was_measured(worlds: Worlds, tmp_path: Path) -> None:
    for plan, error in worlds("gloo", 2).run(unfused_wins, str(tmp_path)):
        assert plan == "unfused: measured" and error < 1e-5


def broken(me: Member, root: str) -> tuple[str, float, str]:
    folder, said = Path(root) / str(me.rank), []
    key = tuned_choices.key_of(torch.device("cpu"), me.world_size)
    write(folder, me.world_size, tuned(me.world_size, CONFIG))
    if me.rank == 1:
        (folder / key.file_name).write_text("{}")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("tileweave")
    log.addHandler(handler)
    try:
        with cache_of(folder):
            return *call(me), "\n".join(said)
    finally:
        log.removeHandler(handler)


def test_broken_file_is_named_and_not_used(worlds: Worlds, tmp_path: Path) -> None:
    first, second = worlds("gloo", 2).run(broken, str(tmp_path))
    assert (
        first[0] == second[0]
        and first[0].endswith(": measured")
        and max(first[1], second[1]) < 1e-5
    )
    assert first[2] == ""
    assert "without tuned results" in second[2] and str(tmp_path / "1") in second[2]
    assert "remedy: tileweave tune --clear" in second[2]


def other_kernels(me: Member, root: str) -> str:
    kernels = "portable" if me.rank == 1 else "all"
    with cache_of(Path(root), TILEWEAVE_KERNELS=kernels):
        return refusal(call, me)


def test_ranks_with_other_kernels_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    for said in worlds("gloo", 2).run(other_kernels, str(tmp_path)):
        assert said.startswith(
            "RankMismatchError: asked: TILEWEAVE_KERNELS=all on rank 0, portable"
        )


def bound(me: Member, root: str, kinds: int) -> tuple[str, str]:
    """Ranks 0 and 1 have called with one cache; ranks 2 and 3 with another, or with none."""
    pairs = [me.group(0, 1), me.group(2, 3), me.group(1, 2)]
    first = me.rank < 2
    folder = Path(root) / ("a" if first else "b")
    if me.rank in (0, 2) and (first or kinds == 2):
        write(folder, 2, tuned(2, CONFIG if first else OTHER))
    me.barrier()
    with cache_of(folder):
        if first or kinds == 2:
            call(me, pairs[0 if first else 1])
        me.barrier()
        said = refusal(call, me, pairs[2]) if me.rank in (1, 2) else ""
        x, w = torch.zeros(ROWS, DEPTH), torch.zeros(COLS, DEPTH)
        plan = tw.explain(OP, x, w, group=pairs[2]) if me.rank in (1, 2) else ""
        me.barrier()
        return said, str(plan)


def test_groups_that_have_planned_differently_do_not_mix(worlds: Worlds, tmp_path: Path) -> None:
    found = worlds("gloo", 4).run(bound, str(tmp_path / "2"), 2)
    for said, _ in found[1:3]:
        assert said.startswith("RankMismatchError: asked: a group of ranks that have planned by")
    found = worlds("gloo", 4).run(bound, str(tmp_path / "1"), 1)
    for said, plan in found[1:3]:
        assert said == "" and plan.endswith(": measured"), "rank 2 plans as rank 1 has"


def not_connected(me: Member, root: str) -> tuple[str, float]:
    from tileweave.planning.machine import CPU

    machine = replace(CPU, unreachable="GPU 1 has no peer access" if me.rank == 1 else "")
    with (
        cache_of(Path(root)),
        mock.patch.object(tuned_choices, "machine_of", return_value=machine),
    ):
        xs = torch.ones(ROWS, DEPTH)
        y = tw.all_gather_matmul(xs, torch.ones(COLS, DEPTH))
        said = tuned_choices.agree(dist.group.WORLD, xs.device)
        return said, (y - DEPTH).norm().item()


def test_one_device_without_peer_access_makes_all_ranks_run_unfused(
    worlds: Worlds, tmp_path: Path
) -> None:
    found = worlds("gloo", 2).run(not_connected, str(tmp_path))
    assert found == [("GPU 1 has no peer access", 0.0)] * 2


def added(me: Member, root: str) -> tuple[str, float]:
    with cache_of(Path(root)):
        call(me)
        tuned_choices.add(torch.device("cpu"), me.world_size, [tuned(me.world_size, OTHER)])
        return call(me)


def test_results_that_were_just_measured_are_used_at_once(worlds: Worlds, tmp_path: Path) -> None:
    for plan, error in worlds("gloo", 2).run(added, str(tmp_path)):
        assert plan.endswith(": measured") and "32x16" in plan and error < 1e-5


@pytest.mark.parametrize("size", [1, 9])
def test_groups_that_are_never_fused_read_nothing(size: int, monkeypatch) -> None:
    monkeypatch.setattr(tuned_choices, "key_of", lambda *_: pytest.fail("the cache was read"))
    tuned_choices.read(torch.device("cuda", 0), size)
