"""A call that was checked and planned is found again by its signature. Whatever checks, plans or
kernels depend on is a part of it: a call that differs there is not taken for the earlier one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tileweave.errors import InputError
from tileweave.ops.embedding import bag_all_to_all, bag_all_to_all_fused
from tileweave.ops.experts import grouped_matmul_combine as combine
from tileweave.ops.matmul import inputs
from tileweave.planning import choices
from tileweave.planning.measurements import Measurement
from tileweave.planning.problem import MatmulConfig, Plan, Problem
from tileweave.planning.topology import Topology

CONFIG = MatmulConfig("triton", "sm", 16, 16, 16, 1, 4)
RANKS = Topology.one_node(2)


class OnDevice1(torch.Tensor):
    """As if it was on another GPU."""

    def get_device(self) -> int:
        return 1


def like(t: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors that differ from ``t`` [a, b] in one respect each."""
    other = torch.bfloat16 if t.dtype != torch.bfloat16 else torch.float16
    return {
        "rows": t.new_zeros(t.shape[0] + 1, *t.shape[1:]),
        "columns": t.new_zeros(*t.shape[:-1], t.shape[-1] + 8),
        "strides": t.new_zeros(*t.shape[:-2], t.shape[-1], t.shape[-2]).transpose(-1, -2),
        "dtype": t.to(other),
    }


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The workspace of every group; nothing is asked of ranks."""
    found: Any = SimpleNamespace(accepted={})
    for module in (inputs, combine):
        monkeypatch.setattr(module, "REGISTRY", SimpleNamespace(find=lambda *_: found))
        monkeypatch.setattr(module, "workspace_of", lambda *_: found)
        monkeypatch.setattr(module, "group_of", lambda name: name)
        monkeypatch.setattr(module, "topology_of", lambda *_: RANKS)
    monkeypatch.setattr(inputs.dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(inputs.tuned_choices, "agree", lambda *_: "")
    return found


def test_a_matmul_that_differs_is_checked_and_planned(workspace: Any) -> None:
    made: list[str] = []

    def call(op: str = "op", options: object = (1, 2), **changed: Any) -> Plan:
        t: dict[str, Any] = {
            "x": torch.zeros(4, 8),
            "w": torch.zeros(16, 8),
            "bias": torch.zeros(1, 16),
            "out": torch.zeros(8, 16),
        }
        t.update(changed)
        return inputs.accept(
            op,
            "group",
            t["x"],
            t["w"],
            (t["bias"],),
            (t["out"],),
            options,
            lambda size: made.append("check"),
            lambda ranks: made.append("plan") or Plan("fused", "", CONFIG),
        )

    first = call()
    assert made == ["check", "plan"] and call() is first and len(made) == 2
    others: dict[str, dict[str, Any]] = {"op": {"op": "other"}, "options": {"options": (1, 3)}}
    for name, shape in {"x": (4, 8), "w": (16, 8), "bias": (1, 16), "out": (8, 16)}.items():
        for what, t in like(torch.zeros(shape)).items():
            others[f"{name}: {what}"] = {name: t}
        if name != "x":  # the workspace is found by that of x
            others[f"{name}: device"] = {name: torch.zeros(shape).as_subclass(OnDevice1)}
    others["no bias"], others["no out"] = {"bias": None}, {"out": None}
    for name, changed in others.items():
        made.clear()
        found = call(**changed)
        assert made == ["check", "plan"], f"{name} is no part of the signature"
        assert call(**changed) is found and len(made) == 2, name
    for name in ("x", "w", "bias"):  # addresses are no part of it
        both = torch.zeros(256)
        shape = {"x": (4, 8), "w": (16, 8), "bias": (1, 16)}[name]
        result = both[-128:].view(8, 16)
        with pytest.raises(InputError, match="out= in the storage of an input"):
            call(**{name: both[: shape[0] * shape[1]].view(shape), "out": result})


def test_ranks_agree_on_whatever_they_must(workspace: Any) -> None:
    """The checksum that peers compare: of operator, shapes, dtype, options, and how it runs."""

    def mark(op: str = "op", rows: int = 4, options: object = 1, tile: int = 16, **of: Any) -> int:
        x, w = torch.zeros(rows, 8, **of), torch.zeros(16, 8, **of)
        config = MatmulConfig("triton", "sm", tile, 16, 16, 1, 4)
        workspace.accepted.clear()
        chosen: Any = inputs.accept(
            op, "g", x, w, (None,), (None,), options, lambda _: None, lambda _: Plan("", "", config)
        )
        return chosen.checksum

    marks = [
        mark(),
        mark(op="other"),
        mark(rows=5),
        mark(options=2),
        mark(tile=32),
        mark(dtype=torch.bfloat16),
    ]
    assert len(set(marks)) == len(marks) and mark() == marks[0]


def test_a_combine_that_differs_is_checked(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(combine, "check_inputs", lambda *_: made.append("check"))
    monkeypatch.setattr(combine, "plan_grouped", lambda *_: Plan("fused", "", CONFIG))
    usual: dict[str, Any] = {
        "y": torch.zeros(32, 8),
        "experts": torch.zeros(2, 16, 8),
        "table": torch.zeros(40, dtype=torch.int32),
        "weights": torch.zeros(4, 2),
        "out": torch.zeros(4, 16),
        "max_tokens": 4,
        "topk": 2,
    }

    def call(**changed: Any) -> None:
        t = usual | changed
        plan: Any = SimpleNamespace(
            table=t["table"], tokens=4, max_tokens=t["max_tokens"], topk=t["topk"]
        )
        made.clear()
        with monkeypatch.context() as patch:
            patch.setattr(combine, "check_tokens", lambda *_: made.append("tokens"))
            combine._accept(t["y"], t["experts"], plan, t["weights"], t["out"], "group")

    call()
    assert made == ["check"]
    call()
    assert made == ["tokens"], "what is known is checked for what may differ"
    others: dict[str, dict[str, Any]] = {
        "max_tokens": {"max_tokens": 8},
        "topk": {"topk": 1},
        "table: shape": {"table": torch.zeros(41, dtype=torch.int32)},
        "table: dtype": {"table": torch.zeros(40, dtype=torch.int64)},
        "weights": {"weights": None},
        "weights: dtype": {"weights": usual["weights"].double()},
        "out": {"out": None},
        "out: dtype": {"out": usual["out"].double()},
    }
    for name in ("y", "experts"):
        others |= {f"{name}: {what}": {name: t} for what, t in like(usual[name]).items()}
    for name in ("y", "experts", "table", "weights", "out"):
        others[f"{name}: device"] = {name: usual[name].to("meta")}
    for name, changed in others.items():
        call(**changed)
        assert made == ["check"], f"{name} is no part of the signature"


def test_lookups_that_differ_have_signatures_of_their_own() -> None:
    table, square = torch.zeros(10, 4), torch.zeros(4, 4)
    usual: dict[str, Any] = {
        "tables": [table],
        "indices": torch.zeros(6, dtype=torch.int64),
        "offsets": torch.zeros(4, dtype=torch.int64),
        "weights": torch.zeros(6),
        "batch": 3,
        "mean": False,
        "dtype": torch.float32,
        "layout": (1, 4),
    }

    def signature(**changed: Any) -> object:
        t = usual | changed
        lists = t["indices"], t["offsets"], t["weights"]
        words = t["mean"], t["dtype"], *t["layout"]
        return bag_all_to_all._signature(t["tables"], lists, t["batch"], *words)

    others: dict[str, dict[str, Any]] = {
        "another table": {"tables": [torch.ones(10, 4)]},
        "shape of a table": {"tables": [table.view(5, 8)]},
        "dtype of a table": {"tables": [table.view(torch.int32)]},
        "square table": {"tables": [square]},
        "strides of a table": {"tables": [square.t()]},
        "device of a table": {"tables": [table.as_subclass(OnDevice1)]},
        "two tables": {"tables": [table, table]},
        "batch": {"batch": 2},
        "type of batch": {"batch": 3.0},
        "mean": {"mean": True},
        "dtype": {"dtype": torch.float16},
        "layout": {"layout": (1, 8)},
        "number of offsets": {"offsets": torch.zeros(5, dtype=torch.int64)},
        "no weights": {"weights": None},
        "too few weights": {"weights": torch.zeros(5)},
        "many more indices": {"indices": torch.zeros(600, dtype=torch.int64)},
    }
    for name in ("indices", "offsets", "weights"):
        t = usual[name]
        others[f"dtype of {name}"] = {name: t.to(torch.int32)}
        others[f"dimensions of {name}"] = {name: t.view(2, -1)}
        others[f"strides of {name}"] = {name: torch.stack([t, t], 1)[:, 0]}
        others[f"device of {name}"] = {name: t.as_subclass(OnDevice1)}
    found = {name: signature(**changed) for name, changed in others.items()}
    found["usual"] = signature()
    assert found["usual"] == signature()
    assert len(set(found.values())) == len(found), "two calls that differ have the same signature"


def test_addresses_of_tables_are_kept_for_the_same_tables_only() -> None:
    """A kernel reads address, rows, dim and first column of each table from this tensor."""
    cpu, cache = torch.device("cpu"), {}
    table, other = torch.zeros(10, 4), torch.zeros(10, 4)
    calls = [([table], [0]), ([other], [0]), ([table.view(5, 8)], [0]), ([table], [4])]
    for tables, columns in calls * 2:
        found = bag_all_to_all_fused.meta_of(cache, tables, columns, cpu, False)
        t = tables[0]
        assert found.tolist() == [[t.data_ptr(), *t.shape, columns[0]]]
    assert len(cache) == len(calls)
    many = [torch.zeros(2, 4) for _ in range(70)]
    for t in many:
        bag_all_to_all_fused.meta_of(cache, [t], [0], cpu, False)
    assert len(cache) == bag_all_to_all_fused._MOST_METAS, "old tables are forgotten"


def test_plans_are_made_again_after_choices_changed() -> None:
    """Whatever was measured or forced meanwhile: also where calls have no workspace."""
    cpu, machine = torch.device("cpu"), inputs.machine_of(torch.device("cpu"))
    registry, plan = inputs.REGISTRY, Plan("fused", "")

    def known() -> list[int]:
        """How many plans are kept; then each place has one."""
        places = [inputs._plan.cache_info().currsize, len(registry.accepted("a group", cpu))]
        inputs._plan(lambda *_: plan, RANKS, 8, 8, 8, torch.float32, "", machine, False)
        registry.accepted("a group", cpu)["call"] = plan
        return places

    known()
    assert known() == [1, 1], "nothing has changed"
    choices.install([])
    assert known() == [0, 0]
    choices.clear()
    assert known() == [0, 0]
    with choices.forced("op", CONFIG):
        assert known() == [0, 0]
        with choices.forced("op", None), choices.forced("other", None):
            assert known() == [0, 0] and choices.forced_config("op") is None
        assert known() == [0, 0] and choices.forced_config("op") == CONFIG
        assert not choices.is_forced("other")
    assert known() == [0, 0] and not choices.is_forced("op")
    registry.close("a group")
    assert "a group" not in {name for name, _ in registry._accepted}


def test_measurements_of_another_operator_are_not_found() -> None:
    problem = Problem(2, 8, 8, 8, 4, "float32")
    of_a, of_b = (Measurement(op, problem, {None: us}) for op, us in (("a", 1.0), ("b", 2.0)))
    try:
        choices.install([of_a, of_b])
        assert choices.installed("a") == (of_a,) and choices.installed("c") == ()
        assert choices.find("b", problem) == of_b and choices.find("c", problem) is None
    finally:
        choices.clear()
    assert choices.installed("a") == () and choices.find("a", problem) is None
