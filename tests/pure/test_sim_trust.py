"""Accuracy of the packaged calibration on measured cells, and fitting without the held-out
cells."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tileweave.commands.simulate import app
from tileweave.errors import InputError, UnsupportedError
from tileweave.planning.costs import load_calibration
from tileweave.sim import crosscheck
from tileweave.sim.cells import Cell, alone, read_cells
from tileweave.sim.fit import BLOCKS, START, fit, nelder_mead
from tileweave.sim.measurements import STEADY, merge_runs, quantity_of, unsteadiness
from tileweave.sim.packaged import devices, packaged_cells, write
from tileweave.sim.predict import measured_config
from tileweave.sim.trust import GOOD_MEAN, GOOD_WORST, judge, published, repeatability, summarise

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
TIMES = packaged_cells("h200")
CELLS, UNSTEADY = merge_runs(TIMES)
RECORDED_OVER = 0  # held-out cells with errors above 20 %, as listed in docs/simulator.md
UNMODELLED = {  # as stated in docs/simulator.md: these were measured with older kernels
    (op, "prototype")
    for op in (
        "matmul_reduce_scatter",
        "matmul_all_reduce",
        "dispatch_grouped_matmul",
        "grouped_matmul_combine",
    )
}


def test_shipped_calibration_meets_its_accuracy_limits() -> None:
    """The geometric mean of held-out errors is at most 8 %, of all cells and of each kind. The
    limit per cell is 20 %: the number of cells above it is recorded here and in
    docs/simulator.md."""
    judged, unknown = judge(CELLS)
    assert {(cell.op, cell.quantity) for cell in unknown} - UNMODELLED == set(), (
        "a measured cell that no model covers"
    )
    for side in ("held out", "fit"):
        whole = summarise(judged, side)[-1]
        assert whole.count >= 350 and whole.mean <= GOOD_MEAN, whole
    held = [one for one in judged if one.side == "held out"]
    for quantity in ("compute", "unfused", "fused", "bound", "library"):
        same = [
            one
            for one in held
            if one.cell.quantity == quantity and one.cell.op != "grouped_matmul_combine"
        ]
        assert len(same) >= 10 and summarise(same, "held out")[-1].mean <= GOOD_MEAN, quantity
    over = [one for one in held if abs(math.log(1.0 + one.error)) > math.log(1.0 + GOOD_WORST)]
    assert len(over) <= RECORDED_OVER, [str(one.cell) for one in over]
    recorded = f"{RECORDED_OVER} of {len(held)} held-out cells are over 20 %"
    text = " ".join((ROOT / "docs" / "simulator.md").read_text("utf-8").split())
    assert recorded in text, f"docs/simulator.md does not say: {recorded}"


def test_another_device_is_predicted_from_its_data_sheet() -> None:
    """Two H100, which no fit has seen, predicted by the fractions of peak of the H200; figures as
    in docs/simulator.md."""
    cells, _ = merge_runs(packaged_cells("h100"))
    judged, unknown = judge(cells, device="h100")
    whole = [one for one in judged if one.side in ("fit", "held out")]
    errors = [abs(math.log(1.0 + one.error)) for one in whole]
    mean, over = (
        math.exp(sum(errors) / len(errors)) - 1.0,
        sum(error > math.log(1.0 + GOOD_WORST) for error in errors),
    )
    assert not unknown and (len(whole), f"{mean:.1%}", over) == (561, "4.3%", 8)
    taken_for_h200 = [abs(math.log(1.0 + one.error)) for one in judge(cells)[0]]
    assert sum(taken_for_h200) / len(taken_for_h200) > 3 * sum(errors) / len(errors), (
        "the data sheet makes the difference"
    )


@pytest.mark.parametrize("device", devices())
def test_packaged_cells_are_those_of_the_results(device: str) -> None:
    """Only of results that are still kept as files."""
    packaged: dict[str, list[Cell]] = {}
    for cell in packaged_cells(device):
        packaged.setdefault(cell.source, []).append(cell)
    kept = [path for path in sorted(RESULTS.rglob("*.json")) if path.name in packaged]
    assert len(kept) >= 7
    for path in kept:
        found, cells = packaged[path.name], read_cells([path])
        assert list(map(str, found)) == list(map(str, cells))
        assert [cell.seconds for cell in found] == pytest.approx(
            [cell.seconds for cell in cells], rel=1e-5
        )
        assert [cell.tables and cell.tables.entries for cell in found] == [
            c.tables and c.tables.entries for c in cells
        ]
        assert [unsteadiness(cell) > STEADY for cell in found] == [
            unsteadiness(cell) > STEADY for cell in cells
        ]


def test_packaged_cells_are_updated_by_new_runs(tmp_path: Path) -> None:
    config = {
        "kernel": "hopper",
        "transport": "sm",
        "tile_m": 64,
        "tile_n": 64,
        "tile_k": 128,
        "num_stages": 6,
        "num_warps": 4,
    }
    entry = {
        "op": "matmul_all_reduce",
        "quantity": "fused",
        "shape": [512, 4096, 4096],
        "graph": True,
        "us": 30.0,
    }
    results, file = tmp_path / "new.json", tmp_path / "h200.json"
    for us in (30.0, 31.0):
        report = {
            "machine": {"world_size": 2},
            "again": True,
            "components": [{**entry, "us": us, "config": config}],
        }
        results.write_text(json.dumps(report), "utf-8")
        write(file, [results])
    ((run,), tables) = (json.loads(file.read_text("utf-8"))[name] for name in ("runs", "tables"))
    assert (
        run["cells"] == [{**entry, "world": 2, "us": 31.0, "again": True, "config": config}]
        and tables == {}
    )
    before = file.read_bytes()
    write(file, [results])
    assert file.read_bytes() == before


def test_a_device_without_cells_is_refused() -> None:
    with pytest.raises(
        InputError, match="cells of a100; allowed: cells of h100 or h200; remedy: pass --cells"
    ):
        packaged_cells("a100")


def test_held_out_cells_are_chosen_by_shape_alone() -> None:
    sides = {cell.key: cell.held_out for cell in CELLS if not cell.primitive}
    assert 0.35 < sum(sides.values()) / len(sides) < 0.65
    for cell in CELLS:
        assert cell.primitive or cell.held_out == sides[cell.key]
        assert replace(cell, seconds=cell.seconds * 9).held_out == cell.held_out


def test_repeated_runs_count_once_by_their_median() -> None:
    kept = [cell for cell in map(alone, TIMES) if unsteadiness(cell) <= STEADY]
    assert sum(cell.runs for cell in CELLS) == len(kept) and len(
        {quantity_of(cell) for cell in CELLS}
    ) == len(CELLS)
    cell = replace(next(cell for cell in CELLS if cell.quantity == "unfused"), runs=1)
    runs = [replace(cell, seconds=cell.seconds * factor) for factor in (1.0, 3.0, 1.2)]
    assert [(one.runs, one.seconds) for one in merge_runs(runs)[0]] == [
        (3, pytest.approx(1.2 * cell.seconds))
    ]
    # another launch mode is another quantity
    assert merge_runs([cell, replace(cell, graph=not cell.graph)])[0][1].runs == 1


def test_unsteady_times_are_left_out_by_their_repeats() -> None:
    """Independent of the time and of the side of the cell."""
    for held_out in (True, False):
        cell = next(
            cell for cell in CELLS if cell.held_out == held_out and cell.quantity == "unfused"
        )
        late = replace(cell, repeats=(1.0, 1.0, 1.0, 1.2, 1.2))
        assert (
            merge_runs([late]) == ([], [late]) and merge_runs([replace(late, seconds=9.0)])[0] == []
        )
        # a median is robust against one late run
        once = replace(cell, repeats=(1.0, 1.0, 1.0, 1.0, 5.0))
        assert len(merge_runs([once])[0]) == 1
    assert UNSTEADY and all(unsteadiness(cell) > STEADY for cell in UNSTEADY)


def test_bare_collectives_are_one_quantity() -> None:
    of_matmul = Cell("x", "all_gather_matmul", "comm", 4, (512, 28672, 8192), True, 1e-4)
    by_bytes = Cell("y", "all_gather", "comm", 4, (8388608,), True, 2e-4)
    assert [(c.key, c.seconds, c.runs) for c in merge_runs([of_matmul, by_bytes])[0]] == [
        ("8388608", pytest.approx(1.5e-4), 2)
    ]


def test_held_out_cells_are_not_fitted() -> None:
    held = {str(cell) for cell in CELLS if cell.held_out or not cell.in_domain}
    assert held and not held & set(load_calibration().fitted_on)


def test_fit_does_not_depend_on_held_out_cells() -> None:
    """The coefficients are equal when every held-out time is wrong by ten, and differ when a fitted
    one is."""
    some = [
        cell
        for cell in CELLS
        if cell.op == "embedding_bag_all_to_all" and cell.quantity in ("compute", "concat")
    ]
    wrong = [replace(cell, seconds=cell.seconds * 10) if cell.held_out else cell for cell in some]
    right = fit(some).coefficients
    assert right != START and fit(wrong).coefficients == right
    moved = [
        replace(cell, seconds=cell.seconds * 2) if not cell.held_out else cell for cell in some
    ]
    assert fit(moved).coefficients != right


def test_missing_measurement_is_reported() -> None:
    some = [cell for cell in CELLS if cell.quantity == "concat"]
    found = fit(some)
    assert "stream" not in found.not_fitted and "corun" in found.not_fitted
    fitted = {name for block in BLOCKS for name in block.coefficients}
    assert {name for name in START.__dataclass_fields__ if name not in (*fitted, "nccl")} <= set(
        found.not_fitted
    )


def test_nelder_mead_finds_a_minimum() -> None:
    found = nelder_mead(lambda x: (x[0] - 1) ** 2 + 10 * (x[1] + x[0]) ** 2, [4.0, 4.0], 0.5, 200)
    assert found == pytest.approx([1.0, -1.0], abs=1e-3)


def test_cells_are_extended_by_any_bench_result(tmp_path: Path) -> None:
    times = {
        "tileweave": {"median_us": 10.0},
        "gemm": {"median_us": 8.0},
        "torch fused": {"median_us": 9.0},
        "nccl+cublas": {},
    }
    case = {"rows": 2048, "cols": 8192, "depth": 4096, "graph": True, "right": True, "times": times}
    report = {
        "op": "matmul_reduce_scatter",
        "world_size": 2,
        "cases": [case, {**case, "right": False}],
    }
    path = tmp_path / "new.json"
    path.write_text(json.dumps(report), "utf-8")
    found = read_cells([path])
    assert [(c.quantity, round(c.seconds * 1e6, 6)) for c in found] == [
        ("fused", 10.0),
        ("compute", 8.0),
    ]
    assert all(judge(found)[0][i].predicted > 0 for i in range(2))
    path.write_text(
        json.dumps({**report, "cases": [{**case, "path": "unfused: not measured yet"}]}), "utf-8"
    )
    # a fallback is no measurement of a fused kernel
    assert [c.quantity for c in read_cells([path])] == ["compute"]
    path.write_text("{", "utf-8")
    with pytest.raises(InputError, match="line 1"):
        read_cells([path])
    path.write_text("{}", "utf-8")
    with pytest.raises(InputError, match="`cases`, `components` or `sweeps`"):
        read_cells([path])


def test_components_name_the_measured_kernel(tmp_path: Path) -> None:
    """A kernel that bypasses the planner is predicted as before. Repeated matmuls are slower, where
    it multiplies."""
    config = {
        "kernel": "hopper",
        "transport": "sm",
        "tile_m": 64,
        "tile_n": 64,
        "tile_k": 128,
        "num_stages": 6,
        "num_warps": 4,
    }
    fused = {
        "op": "matmul_all_reduce",
        "quantity": "fused",
        "shape": [512, 4096, 4096],
        "graph": True,
        "us": 30.0,
    }
    plain = {"op": "matmul", "quantity": "compute", "graph": True, "us": 30.0, "world_size": 1}
    listed = [
        {**fused, "config": config},
        {**plain, "shape": [1024, 8192, 4096]},
        {**plain, "shape": [16, 8192, 4096]},
    ]
    path, report = tmp_path / "new.json", {"machine": {"world_size": 2}, "components": listed}
    path.write_text(json.dumps(report), "utf-8")
    in_turns = read_cells([path])
    path.write_text(json.dumps({**report, "again": True}), "utf-8")
    again = read_cells([path])
    found = measured_config(again[0])
    assert found is not None and (found.tile_m, found.tile_n, found.transport) == (64, 64, "sm")
    before, after = ([one.predicted for one in judge(cells)[0]] for cells in (in_turns, again))
    assert after[0] == before[0] and after[1] > 1.03 * before[1] and after[2] < 1.01 * before[2]
    assert quantity_of(in_turns[1]) != quantity_of(again[1]) and quantity_of(
        in_turns[0]
    ) == quantity_of(again[0])


def test_repeated_measurements_bound_the_accuracy() -> None:
    pairs, mean, worst = repeatability(TIMES)
    assert pairs > 20 and 0.01 < mean < 0.10 < worst


def test_unaligned_shapes_are_not_claimed() -> None:
    odd = Cell("x", "all_gather_matmul", "fused", 4, (4084, 10000, 5000), False, 1e-3)
    assert not odd.in_domain and replace(odd, shape=(4084, 10240, 5120)).in_domain
    assert replace(odd, quantity="compute").in_domain, "of cuBLAS alone the model knows"


def test_published_trends() -> None:
    """More rows hide more communication, and a slower link leaves more to hide. Decode on eight
    H800 gains far less than prefill."""
    found = {row.what: row for row in published()}
    assert found["h800, m 1024 to 8192"].ours_mean > found["h800, m 64 to 512"].ours_mean
    assert found["a100, m 1024 to 8192"].ours_high > 0.3
    assert 0.0 <= found["embedding + all-to-all"].ours_mean < 0.5


@pytest.mark.skipif(
    crosscheck.interpreter() is None, reason="SimGrid is not installed: apt install python3-simgrid"
)
def test_simgrid_agrees() -> None:
    for row in crosscheck.compare(32):
        assert abs(row.error) <= 0.10, row


def test_missing_simgrid_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crosscheck, "interpreter", lambda: None)
    with pytest.raises(UnsupportedError, match="apt install python3-simgrid"):
        crosscheck.compare(8)


def test_simgrid_gets_every_flow() -> None:
    (flows,) = crosscheck.rounds_of("all_to_all", 8, 800.0)
    assert len(flows) == 56 and {size for _, _, size in flows} == {100.0}
    assert len(crosscheck.rounds_of("all_reduce", 8, 800.0)) == 14


# --- The command ---


def test_the_command_writes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    done = CliRunner().invoke(
        app, ["dlrm", "--nodes", "16", "--out", "out", "--export", "traces", "--advise"]
    )
    assert done.exit_code == 0, done.output
    for word in (
        "unfused",
        "fused",
        "bound",
        "exposed communication",
        "sensitivity",
        "busiest rank 30 %",
        "slices",
        "fuse",
    ):
        assert word in done.output, word
    assert {path.suffix for path in Path("out").iterdir()} == {".json", ".png"}
    assert len(list(Path("traces").glob("*.et"))) == 128
    assert Path("traces/network.yml").is_file() and Path("traces/system.json").is_file()
    traces = [f"traces/step.{rank}.et" for rank in range(4)]
    again = CliRunner().invoke(app, ["replay", *traces, "--network-file", "traces/network.yml"])
    assert again.exit_code == 0 and "4 ranks" in again.output, again.output


@pytest.mark.parametrize(
    "command", [["serve", "llama3-70b"], ["moe", "mixtral-8x7b", "--gpus", "8"], ["machines"]]
)
def test_simulate_subcommands(command: list[str]) -> None:
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and ("unfused" in done.output or "mi300x" in done.output)


def test_the_command_names_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("workload: serve\nmodel: llama3-70b\nbatch: many\n", "utf-8")
    done = CliRunner().invoke(app, ["run", str(path)])
    assert isinstance(done.exception, InputError)  # the entry point prints these in one line
    assert "bad.yaml, line 3, field batch: asked: 'many'; allowed: a whole number from 1" in str(
        done.exception
    )
    with pytest.raises(InputError, match="gpt3-175b"):
        CliRunner().invoke(app, ["train", "gpt4"], catch_exceptions=False)
