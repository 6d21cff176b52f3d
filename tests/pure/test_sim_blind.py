"""The model against random shapes on four H200, to none of which a coefficient was fitted: each in
the config of the plan that it ran with. Figures as in docs/simulator.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tileweave.errors import InputError
from tileweave.planning.candidates import PLANNED, can_run, takes_rows
from tileweave.planning.costs import Costs, data_sheet, load_calibration
from tileweave.planning.machine import H200
from tileweave.planning.problem import Problem
from tileweave.sim.cells import Cell, config_of_plan, read_cells
from tileweave.sim.foresee import DEVICES, among, table
from tileweave.sim.packaged import packaged_cells
from tileweave.sim.plans import fused_config
from tileweave.sim.predict import Predictor, measured_config, problem_of
from tileweave.sim.tables import with_config
from tileweave.sim.trust import GOOD_MEAN, judge, summarise

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FIRST = sorted(RESULTS.glob("random-*-4xH200-2026-11-26.json"))
# all-reduces by tiles, since their kernel has changed. A third run has the shapes of the first.
SECOND = [RESULTS / f"random-matmul_all_reduce-4xH200-2026-11-27{run}.json" for run in ("", "-b")]
FILES = [*FIRST, *SECOND]


def by_tiles(cell: Cell) -> bool:
    """Whether it is a fused all-reduce with copy engines."""
    if cell.op != "matmul_all_reduce" or cell.quantity != "fused":
        return False
    config = measured_config(cell)
    return config is not None and config.transport == "copy_engine"


CELLS = [
    *(cell for cell in read_cells(FIRST) if not by_tiles(cell)),
    *(cell for cell in read_cells(SECOND) if by_tiles(cell)),
]
# geometric means that are over the bar of 8 %: why, docs/simulator.md says
OVER = {
    "all_gather_matmul: compute": 0.085,
    "all_to_all_matmul: unfused": 0.110,
    "dispatch_grouped_matmul: fused": 0.091,
    "embedding_bag_all_to_all: fused": 0.164,
}
THIRD = sorted(RESULTS.glob("random-*-4xH200-2026-11-28.json"))
# of other seeds; three terms of lookups were added after these had been judged
OVER_THIRD = {
    "all_gather_matmul: compute": 0.081,
    "matmul_reduce_scatter: fused": 0.083,
    "dispatch_grouped_matmul: fused": 0.117,
    "grouped_matmul_combine: fused": 0.098,
    "embedding_bag_all_to_all: fused": 0.118,
    "embedding_bag_all_to_all: unfused": 0.108,
}


def test_random_shapes_are_predicted_blind() -> None:
    judged, unknown = judge(CELLS)
    *groups, whole = summarise(judged, None)
    assert (len(FILES), unknown, whole.count) == (10, [], 178)
    assert whole.mean <= 0.061, whole
    assert len(groups) == 19 and set(OVER) < {group.name.rpartition(",")[0] for group in groups}
    for group in groups:
        assert group.mean <= OVER.get(group.name.rpartition(",")[0], GOOD_MEAN), group


def test_random_shapes_with_new_seeds_are_predicted() -> None:
    judged, unknown = judge(read_cells(THIRD))
    *groups, whole = summarise(judged, None)
    assert (len(THIRD), unknown, whole.count) == (8, [], 816)
    assert whole.mean <= 0.073, whole
    for group in groups:
        assert group.mean <= OVER_THIRD.get(group.name.rpartition(",")[0], GOOD_MEAN), group


def test_no_coefficient_was_fitted_to_them() -> None:
    assert not {cell.source for cell in packaged_cells("h200")} & {path.name for path in FILES}


def test_fused_cells_have_the_config_that_they_ran_with() -> None:
    """It decides up to half of the time, and is not always the one that is planned today."""
    fused = [cell for cell in CELLS if cell.quantity == "fused" and cell.op in PLANNED]
    assert len(fused) >= 40 and all(cell.tables is not None for cell in fused)
    planned = [fused_config(cell.op, problem_of(cell), H200) for cell in fused]
    assert [measured_config(cell) for cell in fused] != planned


@pytest.mark.parametrize("op", PLANNED)
def test_a_plan_names_its_config(op: str) -> None:
    for config in PLANNED[op].configs:
        text = f"fused, {config}: predicted 9.0 us; unfused 9.1\n  unfused: predicted 9.1 us"
        assert str(config_of_plan(op, text)) == str(config)
        by_table = f"fused, {config}: as measured for M=4096, 8192 local columns, K=2048 on 4 GPUs"
        assert config_of_plan(op, by_table) is None
    for text in ("unfused: predicted 1.0 us", "fused, a kernel of 1999: predicted 1.0 us", ""):
        assert config_of_plan(op, text) is None


def test_cublas_is_slow_where_rows_are_not_aligned() -> None:
    """Decision 0017: 466 us for 4084 x 2500 x 5000 on H200, three times of what aligned rows
    take."""
    costs = Costs(data_sheet(H200), load_calibration().coefficients)
    assert costs.matmul(4084, 2500, 5000) == pytest.approx(466e-6, rel=0.15)
    assert costs.matmul(4084, 2504, 5000) == pytest.approx(143e-6, rel=0.15)
    assert costs.matmul(4084, 2504, 5001) > 2.0 * costs.matmul(4084, 2504, 5000)


def test_more_ranks_are_predicted_in_the_config_planned_for_them() -> None:
    """Before they are measured, as docs/results/simulator-eight.md is."""
    some = [cell for cell in CELLS if cell.key == "4664x18944x15744"]
    fused = next(cell for cell in some if cell.quantity == "fused")
    more = among(fused, 8, "h200")
    assert more is not None and more.world_size == 8 and more.tables != fused.tables
    rows = [line.split(" | ") for line in table(some, 8).splitlines()[2:]]
    assert (
        len(rows) == 1 and rows[0][1] == "4664x18944x15744" and len(rows[0]) == 3 + 4 * len(DEVICES)
    )
    compute, unfused, ours = map(float, rows[0][3:6])
    assert compute < ours < unfused
    with pytest.raises(InputError, match="2 to 8"):
        table(some, 9)


@pytest.mark.parametrize("op", PLANNED)
def test_each_candidate_is_simulated_or_refused(op: str) -> None:
    """Whatever config a plan names for a number of rows: a time, or an error that says what is
    allowed."""
    predictor = Predictor(load_calibration())
    refused = 0
    for config in PLANNED[op].configs:
        for rows in (4, 40, 1024):  # of all ranks
            own = rows if op == "matmul_all_reduce" else rows // 4
            cell = Cell(
                "", op, "fused", 4, (rows, 2048, 2048), True, 1.0, tables=with_config(op, config)
            )
            if takes_rows(op, config, own, 4):
                assert can_run(op, config, Problem(4, own, 512, 512, 2, "bfloat16"), H200)
                seconds = predictor.seconds(cell)
                assert seconds is not None and 1e-6 < seconds < 1e-3, f"{config!r}, {rows} rows"
            else:
                refused += 1
                with pytest.raises(InputError, match=f"asked: {op} of {rows} rows.*tile_m.*remedy"):
                    predictor.seconds(cell)
    assert refused


def test_one_shot_sends_whole_partial_sums() -> None:
    """Fewer steps for few rows, more bytes for many."""
    op = "matmul_all_reduce"
    one, two = (
        next(c for c in PLANNED[op].configs if c.kernel == "library" and c.shots == shots)
        for shots in (1, 2)
    )
    predictor = Predictor(load_calibration())
    for rows, faster, slower in ((1, one, two), (40, one, two), (1024, two, one)):
        seconds = [
            predictor.seconds(
                Cell("", op, "fused", 4, (rows, 2048, 2048), True, 1.0, tables=with_config(op, c))
            )
            or 0.0
            for c in (faster, slower)
        ]
        assert 0.0 < seconds[0] < seconds[1], f"{rows} rows: {seconds}"
