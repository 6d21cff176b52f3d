"""Files that are nested, hostile or nonsense end in an error that names file, place and what is
allowed; none ends in a raw Python error or takes long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tileweave.errors import InputError
from tileweave.planning.costs import load_calibration
from tileweave.sim.cells import read_cells
from tileweave.sim.chakra import COLL, SEND, Node, read_trace, write_trace
from tileweave.sim.document import Spot, located, parse_document
from tileweave.sim.machine import make_cluster
from tileweave.sim.replay import doubts, read_groups, replay
from tileweave.sim.tables import read_entries
from tileweave.sim.workload import scenario_of

BASE = "workload: serve\nmodel: llama3-70b\ntp: 4\nbatch: {}\n"
VALUES = {
    "an unknown tag": ("!foo 16", "tag '!foo'"),
    "a tag of Python": ("!!python/name:os.system x", "python/name"),
    "no integer": ("!!int abc", "'abc'"),
    "no float": ("!!float x", "'x'"),
    "no boolean": ("!!bool maybe", "'maybe'"),
    "no day": ("2024-13-45", "'2024-13-45'"),
    "no time": ("2020-01-01T99:99:99", "2020-01-01T99"),
    "sixty seconds a minute": ("1:30", "'1:30'"),
    "many digits": ("9" * 5000, "(5002 characters)"),
    "bytes": ("!!binary gaaa", "binary"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_other_kinds_are_named(name: str) -> None:
    value, said = VALUES[name]
    with pytest.raises(InputError) as caught:
        scenario_of(parse_document(BASE.format(value), "file.yaml"))
    message = str(caught.value)
    assert "file.yaml, line 4, field batch: asked: " in message and said in message, message
    assert "allowed: a whole number from 1" in message and len(message) < 300


DLRM = (
    "workload: dlrm\nmodel: {{tables: 3, rows: 9, dim: 8, pooling: 2, batch: 64, dense: 1, "
    "bottom: {}, top: [1]}}\n"
)
TEXTS = {
    "deep lists": ("a: " + "[" * 1000 + "]" * 1000, "line 1: asked: 51 mappings or lists"),
    "deep mappings": ("{a: " * 60 + "1" + "}" * 60, "line 1: asked: 51 mappings"),
    "a list as key": (BASE.format(1) + "[1, 2]: 3\n", "line 5, field ?: asked: a key that is"),
    "a mapping as key": ("? {a: b}\n: 3\n" + BASE.format(1), "line 1"),
    "a long name": (BASE.format(1) + "x" * 900 + ": 1\n", "(902 characters)"),
    "itself": (DLRM.format("&r [*r, *r]"), "field model.bottom.0: asked: a list"),
    "many layers": (DLRM.format("[" + "9, " * 2000 + "9]"), "2001 items; allowed: at most 1000"),
    "no colon": (BASE.format(1) + "tp 8\npp: 2\n", "line 5: asked: could not find expected ':'"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_documents_of_other_kinds_are_named(name: str) -> None:
    text, said = TEXTS[name]
    with pytest.raises(InputError) as caught:
        scenario_of(parse_document(text, "file.yaml"))
    message = str(caught.value)
    assert message.startswith("file.yaml, line ") and said in message, message
    assert "allowed: " in message and "remedy: " in message and len(message) < 600


def test_fields_that_do_not_fit_together_have_a_line() -> None:
    spot = parse_document(BASE.format(1), "file.yaml")
    found = str(located(spot, InputError("asked: tp 3; allowed: 4; remedy: change tp")))
    assert found == "file.yaml, line 3, field tp: asked: tp 3; allowed: 4; remedy: change tp"
    found = str(located(spot, InputError("asked: a sum of 3; allowed: 4; remedy: x")))
    assert found.startswith("file.yaml: asked: a sum")
    known = InputError("file.yaml, line 1: asked: x")
    assert located(Spot("file.yaml", "", spot.node), known) is known


# --- Traces ---


def trace(folder: Path, kind: int, **attributes: object) -> list[Path]:
    path = folder / "step.0.et"
    with path.open("wb") as target:
        write_trace(target, [Node(0, "n", kind, attributes=attributes)])
    return [path]


@pytest.mark.parametrize(
    ("kind", "attributes", "said"),
    [
        (COLL, {"comm_type": 0, "comm_size": "x"}, "comm_size 'x' of node 'n'"),
        (COLL, {"comm_type": "y", "comm_size": 5}, "comm_type 'y' of node 'n'"),
        (COLL, {"comm_type": 0, "comm_size": -5}, "comm_size -5 of node 'n'"),
        (SEND, {"comm_src": "y", "comm_dst": 1}, "comm_src 'y' of node 'n'"),
        (SEND, {"comm_src": 0, "comm_dst": 1, "comm_tag": [True]}, "comm_tag [True] of node"),
    ],
)
def test_attributes_of_other_kinds_are_named(
    tmp_path: Path, kind: int, attributes: dict[str, object], said: str
) -> None:
    paths = trace(tmp_path, kind, **attributes)
    with pytest.raises(InputError) as caught:
        replay(paths, make_cluster("h200"), load_calibration().coefficients)
    assert said in str(caught.value) and str(paths[0]) in str(caught.value)


GROUPS = ["[" * 100_000, '{"1": [1e400]}', '{"1": [-1]}', '{"1": [0, 0]}', '{"1": []}', "[1]"]


@pytest.mark.parametrize(
    "text", [*GROUPS, '{"1": [NaN]}', '{"1": ["0"]}', '{"1": [1000000000000]}']
)
def test_groups_that_cannot_be_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "comm_group.json").write_text(text, "utf-8")
    with pytest.raises(InputError, match=r"comm_group.json.*allowed: a mapping of groups"):
        read_groups(tmp_path / "step.0.et")


def test_endless_lengths_and_ranks_end_at_once() -> None:
    with pytest.raises(InputError, match="no length of a message at byte 10"):
        read_trace(b"\xff" * 3_000_000)
    with pytest.raises(InputError, match="a trace of rank 99999999999999999999"):
        doubts([Path(f"step.{'9' * 200}.et")])


# --- Results, calibrations, tables ---

CASE = {"rows": 8, "cols": 8, "depth": 8, "graph": True, "times": {"tileweave": {"median_us": 3}}}
RESULTS = {
    "deep": "[" * 100_000,
    "not a number": "NaN",
    "a list": "[1, 2]",
    "no operator": json.dumps({"cases": [CASE]}),
    "text": json.dumps({"op": "x", "world_size": 4, "cases": [{**CASE, "rows": "many"}]}),
    "infinite": json.dumps({"op": "all_gather_matmul", "world_size": 4, "cases": [CASE]}).replace(
        ": 3}", ": 1e999}"
    ),
    "below 0": json.dumps(
        {"op": "all_gather_matmul", "world_size": 4, "cases": [{**CASE, "cols": -8}]}
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_of_other_kinds_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(RESULTS[name], "utf-8")
    with pytest.raises(InputError, match=r"results.json.*allowed: .*remedy: "):
        read_cells([path])


def test_calibrations_and_tables_of_other_kinds_are_named(tmp_path: Path) -> None:
    path, good = tmp_path / "calibration.json", load_calibration().as_dict()
    for change in ("x", float("nan"), -1.0, [1.0]):
        coefficients = {**good["coefficients"], "gap": change}  # type: ignore[dict-item]
        path.write_text(json.dumps({**good, "coefficients": coefficients}), "utf-8")
        with pytest.raises(InputError, match=r"calibration with gap = .*allowed: a number from 0"):
            load_calibration(str(path))
        load_calibration.cache_clear()
    path.write_text("[" * 100_000, "utf-8")
    with pytest.raises(InputError, match="asked: calibration"):
        load_calibration(str(path))
    curves = good["coefficients"]["nccl"]  # type: ignore[index]
    for name, change in (
        ("matmul_flops", 0),
        ("matmul_norm", 0.5),
        ("stream", 1e30),
        ("gap", True),
    ):
        coefficients = {**good["coefficients"], name: change}  # type: ignore[dict-item]
        path.write_text(json.dumps({**good, "coefficients": coefficients}), "utf-8")
        with pytest.raises(InputError, match=f"calibration with {name} = .*allowed: a number from"):
            load_calibration(str(path))
    for change in (
        {"kind": []},
        {"kind": "gather"},
        {"world": 1},
        {"world": 2.0},
        {"latency": None},
        {"latency": -1},
        {"knots": []},
        {"knots": [2.0, 1.0]},
        {"fractions": [0.5]},
        {"more": 1},
    ):
        coefficients = {**good["coefficients"], "nccl": [*curves[1:], {**curves[0], **change}]}  # type: ignore[dict-item]
        path.write_text(json.dumps({**good, "coefficients": coefficients}), "utf-8")
        with pytest.raises(InputError, match=r"calibration with nccl = .*allowed: curves of"):
            load_calibration(str(path))
    coefficients = {**good["coefficients"], "nccl": curves[:2]}  # type: ignore[dict-item]
    path.write_text(json.dumps({**good, "coefficients": coefficients}), "utf-8")
    with pytest.raises(InputError, match="allowed: curves of all_gather, all_reduce, all_to_all"):
        load_calibration(str(path))
    with pytest.raises(InputError, match="table mine"):
        read_entries("[" * 100_000, "mine")
