"""An operator is a description, a kernel and a reference (tests/support/toy_operator): nothing else
has to be told of it.

The toy is registered in the ranks of one world, so that no other test sees it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.calls import refusal
from torch._subclasses.fake_tensor import FakeTensorMode

import tileweave as tw
from tileweave.launcher import Member, launch

pytest.importorskip("rich")
pytest.importorskip("typer")
OP = "scale_all_reduce"
FOLDER = Path(__file__).parents[1] / "support/toy_operator"


def everything_knows(me: Member) -> dict[str, Any]:
    """What each of the things that list operators says of the toy."""
    from tests.pure.test_operator_completeness import lacking
    from tests.support.toy_operator import spec

    from tileweave.bench.run import Options, bench
    from tileweave.bench.samples import samples_of
    from tileweave.commands import app
    from tileweave.commands.check import check
    from tileweave.commands.demo import demo
    from tileweave.commands.doctor import _verdicts
    from tileweave.commands.stress import stress
    from tileweave.planning.machine import H200

    found: dict[str, Any] = {"last": list(tw.OPERATORS)[-1], "asked by name": app._operator(OP)}
    x, w = torch.full((3, 4), me.rank + 1.0, requires_grad=True), torch.full((4,), 2.0)
    bias = torch.zeros(4, requires_grad=True)
    y = spec.scale_all_reduce(x, w, bias)
    y.sum().backward()
    assert x.grad is not None and bias.grad is not None
    found["call"], found["gradients"] = y[0, 0].item(), [x.grad[0, 0].item(), bias.grad[0].item()]
    into = torch.empty(3, 4)
    version = into._version
    spec.scale_all_reduce(x.detach(), w, out=into)
    found["out"] = (into[0, 0].item(), into._version > version)
    found["refused"] = refusal(spec.scale_all_reduce, x, w[:2])
    with FakeTensorMode() as fakes:
        found["fake"] = tuple(spec.scale_all_reduce(*map(fakes.from_tensor, (x, w))).shape)
    torch.library.opcheck(
        torch.ops.tileweave.scale_all_reduce.default,
        (x, w, bias, torch.distributed.group.WORLD.group_name),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    found["explain"], found["warmup"] = str(tw.explain(OP, x, w)), str(tw.warmup(OP, x, w))
    found["doctor"] = [f.value for f in _verdicts(4, True, H200) if f.name.startswith(OP)]
    found["documents"] = lacking(OP)
    with mock.patch("tileweave.OPERATORS", (OP,)):
        found["check"] = [(row.op, row.name, row.right) for row in check(me, 3)]
        found["demo"] = [(row.case.op, row.right) for row in demo(me).rows]
        outcome = stress(me, 20, 1, 60.0)
        found["stress"] = (outcome.right, outcome.counts)
    report = bench(me, Options(op=OP, repeats=1, smoke=True))
    found["bench"] = [(case["right"], sorted(case["times"])) for case in report["cases"]]
    tables = samples_of(OP).bench.tables_of(report, 190)
    found["tables"] = [str(table.title).split(",")[0] for table in tables]
    return found


@pytest.mark.timeout(200)
def test_a_new_operator_is_known_everywhere() -> None:
    assert OP not in tw.OPERATORS
    found = launch(everything_knows, world_size=2, device_type="cpu", seconds=150)
    assert found is not None
    assert found["last"] == found["asked by name"] == OP
    assert found["call"] == 6.0 and found["gradients"] == [4.0, 6.0]
    assert found["out"] == (6.0, True)
    assert found["refused"].startswith("InputError: asked: x torch.Size([3, 4])")
    assert found["fake"] == (3, 4)
    assert found["explain"] == found["warmup"] == "fused: a toy has one path"
    assert found["doctor"] == ["fused: a toy has one path"]
    assert [row[:2] for row in found["check"]] == [
        (OP, name) for name in ("shapes", "late ranks", "two groups")
    ]
    assert all(right for *_, right in found["check"])
    assert found["demo"] == [(OP, True)]
    assert found["stress"] == (True, {OP: 20})
    assert found["bench"] == [(True, ["nccl+cublas", "tileweave"])] * 2
    assert found["tables"] == [OP]
    # what an operator of the package would have besides
    assert found["documents"] == [
        "a public function",
        "a row in README.md",
        f"tests/cpu/test_{OP}.py",
        f"tests/multi/test_{OP}.py",
    ]


def test_the_toy_is_three_files() -> None:
    files = {path.name for path in FOLDER.glob("*.py")}
    assert files == {"spec.py", "kernel.py", "reference.py"}
