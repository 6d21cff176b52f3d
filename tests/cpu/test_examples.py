"""The examples run as a reader would run them, and report correct results."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.behaviour import run_example, run_in_fork
from tests.support.worlds import Member, Worlds

from tileweave.bench.environment import WITHOUT_GPUS

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_neighbour_exchange() -> None:
    assert "largest error" in run_example("neighbour_exchange.py", "3", on_gpu=False, fresh=True)


@pytest.mark.parametrize("name", ["moe_training.py", "dlrm_training.py"])
def test_short_training_programs(name: str) -> None:
    """By the command in their first lines, on two ranks. The loss falls."""
    command = (EXAMPLES / name).read_text("utf-8").split('"""')[1].splitlines()[2].split("#")[0]
    launcher, *words = command.split()
    assert launcher == "torchrun"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "src"), "CUDA_VISIBLE_DEVICES": ""},
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output = done.stdout
    losses = [float(line.split()[-1]) for line in output.splitlines() if "loss" in line]
    assert len(losses) == 20 and losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize(
    "name", ["llama_inference.py", "llama_lora.py", "moe_training.py", "dlrm_training.py"]
)
def test_examples_to_copy_are_short_and_public(name: str) -> None:
    lines = (EXAMPLES / name).read_text("utf-8").splitlines()
    assert 20 <= len(lines) <= 60
    imports = [line for line in lines if line.lstrip().startswith(("import ", "from "))]
    ours = [line for line in imports if "tileweave" in line]
    public = ("import tileweave as tw", "import tileweave.integrations.")
    assert ours and all(line.startswith(public) for line in ours), ours
    assert not any("tw._" in line or "._" in line for line in lines)


def test_two_nodes() -> None:
    output = run_example("two_nodes.py", on_gpu=False)
    assert output.count("right") == 4 and "WRONG" not in output
    assert "all_gather_matmul: fused" in output and output.count("2 nodes x 2") == 2


def test_the_bench_over_nodes() -> None:
    """Times mean nothing here."""
    output = run_example("bench_nodes.py", "--ranks", "2", "--repeats", "1", on_gpu=False)
    assert output.count("8, 16, 32") == 2 and "matmul_reduce_scatter" in output


def test_tensor_parallel_block() -> None:
    output = run_example("tensor_parallel_block.py", "--ranks", "4", "--steps", "4", on_gpu=False)
    assert output.count("step ") == 4
    assert "WRONG" not in output


def test_the_block_as_a_benchmark() -> None:
    """Times mean nothing here, but the variants must agree."""
    words = ("--bench", "--ranks", "2", "--tokens", "32", "--hidden", "64", "--repeats", "1")
    output = run_example("tensor_parallel_block.py", *words, on_gpu=False)
    found = [float(line.rsplit(" ", 1)[1]) for line in output.splitlines() if "differs by" in line]
    assert len(found) == 3
    assert max(found) < 1e-5
    assert WITHOUT_GPUS in output


def test_fp8_training_as_a_benchmark(tmp_path: Path) -> None:
    """Times mean nothing here; results and gradients of all variants are compared with fp32."""
    path = tmp_path / "times.json"
    words = "--bench --fp8 --ranks 2 --repeats 1 --only attention --json"
    output = run_example("tensor_parallel_block.py", *words.split(), str(path), on_gpu=False)
    (case,) = json.loads(path.read_text("utf-8"))["cases"]
    assert len(case["times"]) == 16 and len(case["errors"]) == 13
    assert max(case["errors"].values()) < 1e-2 and "WRONG" not in output
    assert "FP8" in case["plans"]["rowwise"][0] and len(case["plans"]["bf16"]) == 2
    assert output.count("rowwise_with_gw_hp") >= 1 and WITHOUT_GPUS in output


def errors_of_a_wrong_layer(me: Member, factor: float) -> dict[str, float]:
    """What the bench of FP8 training finds where one rank's gradient of a weight is wrong."""
    sys.path.insert(0, str(EXAMPLES))
    import tensor_parallel_fp8 as fp8

    member = SimpleNamespace(
        device=me.device, group=dist.group.WORLD, rank=me.rank, world_size=me.world_size
    )
    case = fp8.Case("tiny-mlp-m16", fp8.TINY["tiny"], "mlp", 16)
    column, row = fp8.layers_of("bf16", False, member)["nccl bf16"]

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
            return w.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * (factor if me.rank == 1 else 1.0)

    def wrong(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return row(x, Wrong.apply(w))

    found = fp8.Pair(case, member, 0).errors("bf16", {"a": (column, row), "b": (column, wrong)})
    entry = {"name": "b", "errors": found, "right": False, "times": {}}
    report = {"environment": {}, "graph": False, "world_size": 2, "skipped": []}
    assert not fp8.show({**report, "device_type": "cuda", "cases": []})
    assert not fp8.show({**report, "device_type": "cuda", "cases": [entry]})
    assert "Infinity" not in fp8.as_json({"cases": [entry]})
    assert fp8.said(entry).startswith("WRONG: b ")
    return found


@pytest.mark.parametrize(("factor", "told"), [(1.5, 0.5), (math.nan, math.inf)])
def test_the_benchmark_of_fp8_training_finds_wrong_gradients(
    worlds: Worlds, factor: float, told: float
) -> None:
    for found in worlds("gloo", 2).run(errors_of_a_wrong_layer, factor):
        assert found["a"] < 1e-2 and found["b"] == pytest.approx(told, rel=1e-2)


def test_the_benchmark_of_parallelize(tmp_path: Path) -> None:
    """Losses and gradients of both forms are those of torch's styles."""
    path = tmp_path / "out.json"
    variants = ("tileweave", "tileweave-sequence", "torch", "torch-sequence")
    output = run_example(
        "bench_parallelize.py",
        "--tiny",
        "--repeats",
        "1",
        "--json",
        str(path),
        *variants,
        on_gpu=False,
    )
    (case,) = json.loads(path.read_text("utf-8"))["cases"]
    assert [*case["apart"]] == [*case["times"]] == [*variants] and "WRONG" not in output
    assert max(case["apart"].values()) < 1e-4 and case["losses"]["tileweave"] > 0


def test_a_wrong_block_fails(tmp_path: Path) -> None:
    """The example compares, so it must report a different scale on one device."""
    text = (Path(__file__).parents[2] / "examples" / "tensor_parallel_block.py").read_text("utf-8")
    assert "WRONG" not in run_example(
        "tensor_parallel_block.py", "--ranks", "2", "--steps", "1", on_gpu=False
    )
    for name in ("tensor_parallel_fp8.py", "tensor_parallel_rivals.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    broken = tmp_path / "broken.py"
    broken.write_text(
        text.replace("alone = (whole(x) - target)", "alone = (1.001 * whole(x) - target)"), "utf-8"
    )
    assert "WRONG" in run_example(str(broken), "--ranks", "2", "--steps", "1", on_gpu=False, code=1)


@pytest.mark.parametrize(
    "words",
    [
        "tensor_parallel_block.py --hidden 63",
        "tensor_parallel_block.py --tokens 0",
        "tensor_parallel_block.py --sequence 0",
        "tensor_parallel_block.py --fp8",
        "tensor_parallel_block.py --bench --fp8 --hidden 64",
        "tensor_parallel_block.py --bench --fp8 --only no-such-case",
        "tensor_parallel_block.py --bench --fp8 --ranks 3",
        "dlrm.py 0",
        "moe_layer.py --steps 0",
        "neighbour_exchange.py many",
    ],
)
def test_wrong_arguments_get_a_one_line_error(words: str) -> None:
    output = run_example(*words.split(), on_gpu=False, code=1)
    assert (
        output.startswith("error: asked: ")
        and "remedy:" in output
        and len(output.splitlines()) == 1
    )


def test_moe_layer_bench(tmp_path: Path) -> None:
    """Output and gradients equal those of the unfused layer. Times mean nothing here, but all are
    reported."""
    path = tmp_path / "times.json"
    output = run_example(
        "moe_layer.py",
        "--bench",
        "--ranks",
        "2",
        "--repeats",
        "1",
        "--json",
        str(path),
        on_gpu=False,
    )
    case = json.loads(path.read_text("utf-8"))["cases"][0]
    assert len(case["times"]) == 5 and set(case["differences"]) == {
        "y",
        "x",
        "gate.weight",
        "experts.gate_up_proj",
        "experts.down_proj",
    }
    assert max(case["differences"].values()) < 1e-5 and "WRONG" not in output
    assert WITHOUT_GPUS in output


VERDICTS = """
import math, sys
sys.path[:0] = [sys.argv[1]]
sys.argv[1:] = ["--bench"]
import dlrm_peers, moe_layer, tensor_parallel_block

both = ("tileweave", "unfused")
names = (*both, *(f"{one}, forward" for one in both), "matmuls")
us = {name: {"median_us": 2.0 + (name in both)} for name in names}
ms = {name: dict.fromkeys(dlrm_peers.PHASES, 1.0) for name in ("fused", "unfused", "torch")}
for wrong in (0.0, math.nan, 0.5):
    losses = {"plain": [3.0, 2.0], "fused": [3.0, 2.0 + wrong], "unfused": [3.0, 2.0]}
    block = {name: {"us": 1.0, "difference": wrong} for name in ("tileweave", "other")}
    tensor_parallel_block.launch = lambda *_, **__: block
    layer = {"case": "c", "times": us, "differences": {"y": 0.0, "x": wrong, "w": 0.0}}
    for right in (
        dlrm_peers.report({"ms": ms, "losses": losses}),
        moe_layer.report([layer], "float32"),
        tensor_parallel_block.report({"tileweave": {"us": 1.0, "difference": wrong}}, "float32"),
        tensor_parallel_block.main() == 0,
    ):
        print("verdict", right)
"""


def test_wrong_or_nan_results_fail() -> None:
    said = [
        line.split()[1] for line in output_of(VERDICTS).splitlines() if line.startswith("verdict")
    ]
    assert said == ["True"] * 4 + ["False"] * 8


def differences_with_one_rank_wrong(me: Member, wrong: float) -> tuple[float, float]:
    """What the examples report where only the last rank is wrong: of the experts' layer, and of the
    block."""
    sys.path.insert(0, str(EXAMPLES))
    import moe_layer
    import tensor_parallel_block

    there = SimpleNamespace(device=me.device, group=dist.group.WORLD)
    want = torch.ones(4)
    got = want + (wrong if me.rank == me.world_size - 1 else 0.0)
    layer = SimpleNamespace(
        member=there,
        fused=got,
        unfused=want,
        step=lambda result: {"y": want, "x": result, "w": want},
    )
    found = moe_layer.LayerBench.differences(layer)
    return found["x"], tensor_parallel_block.difference([want, got, want], [want] * 3, there)


@pytest.mark.parametrize(("wrong", "told"), [(0.5, 0.5), (math.nan, math.inf)])
def test_every_rank_counts(worlds: Worlds, wrong: float, told: float) -> None:
    assert worlds("gloo", 2).run(differences_with_one_rank_wrong, wrong) == [(told, told)] * 2


def output_of(script: str) -> str:
    """Output of a script that gets the folder of the examples; their kernels are interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ((code, out, err),) = run_in_fork(environment, ["-c", script, str(EXAMPLES)])
    assert code == 0, err
    return out


def errors_of(script: str) -> list[float]:
    """Output of a script that compares kernels of an example with torch."""
    return [float(line) for line in output_of(script).split()]


INTERACTION = """
import sys, torch
sys.path[:0] = [sys.argv[1]]
import interaction as example
torch.manual_seed(0)
for features, samples in ((7, 3), (18, 2)):
    x, pooled = (torch.randn(samples, n * 16, requires_grad=True) for n in (1, features - 1))
    want, got = example.interaction(x, pooled), example.Interaction.apply(x, pooled)
    gradient = torch.randn_like(want)
    gradients = (torch.autograd.grad(y, (x, pooled), gradient) for y in (want, got))
    pairs = zip(*gradients, strict=True)
    print(max(float((a - b).detach().abs().max()) for a, b in ((want, got), *pairs)))
"""


def test_dlrm_interaction() -> None:
    """The kernels, interpreted, against torch: values and gradients."""
    errors = errors_of(INTERACTION)
    assert len(errors) == 2 and max(errors) < 1e-4


LAYERS = """
import sys, torch
sys.path[:0] = [sys.argv[1]]
import dlrm_layers as example
torch.manual_seed(0)
example.PROGRAMS = 3  # so that each has several blocks of samples, the last one a part of one
for samples, width in ((37, 24), (5, 8)):
    z, bias, labels = torch.randn(samples, width), torch.randn(width), torch.rand(samples).round()
    last = torch.nn.Linear(width, 1)
    for function, words in (
        (example.last_layer, (8 * z, bias, last, labels)),
        (example.relu_backward, (z, torch.relu(torch.randn(samples, width)))),
    ):
        for want, got in zip(function(*words, False), function(*words, True), strict=True):
            assert want.shape == got.shape
            print(float((want - got).abs().max() / want.abs().max()))
"""


def test_dlrm_mlps() -> None:
    """The kernels, interpreted, against torch's autograd: loss and gradients, also of logits far
    from zero."""
    errors = errors_of(LAYERS)
    assert len(errors) == 14 and max(errors) < 1e-5


def test_moe_layer() -> None:
    output = run_example(
        "moe_layer.py", "--style", "deepseek", "--ranks", "2", "--steps", "2", on_gpu=False
    )
    assert output.count("step ") == 2
    assert "WRONG" not in output


class TwoStreams:
    """Replaces ``dlrm_peers.SideStream``: records on which stream an event was made, and after
    which work. All work runs in order."""

    def __init__(self, device: torch.device) -> None:
        self.current, self.log = "first", []

    @contextmanager
    def __call__(self, after: object) -> Iterator[None]:
        self.current, before = "second", self.current
        yield
        self.current = before

    def record(self) -> tuple[str, int]:
        return self.current, len(self.log)

    def join(self, event: object, *tensors: object) -> None:
        self.log.append(("join", event))


def dlrm_step(me: Member) -> tuple[Any, list[Any]]:
    """A step of the example with :class:`TwoStreams`, and two batches."""
    sys.path.insert(0, str(EXAMPLES))
    import dlrm
    import dlrm_peers
    import dlrm_rivals

    batches = [dlrm.draw(number, me.rank, 4, 40, 2, me.device) for number in range(2)]
    tables = dlrm.Step(me, 40, 8, 16).tables
    with mock.patch.object(dlrm_peers, "SideStream", TwoStreams):
        return dlrm_peers.PipelinedStep(me, tables, dlrm_rivals.Unfused, 16, batches[0]), batches


def order_of_a_dlrm_step(me: Member) -> list[tuple[str, object]]:
    """Joins of the first stream, exchanges, lookups and updates, in the order in which two steps
    queue them."""
    step, batches = dlrm_step(me)
    log = step.side.log

    def told(name, function):
        def call(*arguments):
            result = function(*arguments)
            log.append((name, None))
            return result

        return call

    for name in ("begin", "finish"):
        setattr(step, name, told("exchange", getattr(step, name)))
    for name in ("lookup", "update"):
        setattr(step.exchange, name, told(name, getattr(step.exchange, name)))
    step.prepare(batches)
    for number in range(2):
        step(batches[1 - number], batches[number])
    return log


def test_dlrm_step_waits_for_its_ids(worlds: Worlds) -> None:
    """Lookups and updates follow all exchanges of ids that were queued before, after an event of
    the second stream."""
    log = worlds("gloo", 2).run(order_of_a_dlrm_step)[0]
    assert [name for name, _ in log].count("update") == 2
    for at, (name, _) in enumerate(log):
        if name in ("lookup", "update"):
            exchanged = max(place for place in range(at) if log[place][0] == "exchange")
            joined = [event for kind, event in log[:at] if kind == "join" and event is not None]
            assert any(stream == "second" and place > exchanged for stream, place in joined), log[
                : at + 1
            ]


def orders_for_the_graph(me: Member) -> list[bool]:
    """Whether the graph of the update finds the sorted rows, and no row after them: of a batch, and
    of one with fewer ids."""
    step, batches = dlrm_step(me)
    step.prepare(batches)
    found = []
    for part in (1, 2):
        whole = step.sorted
        count = whole.keys.numel() // part
        step.sorted = replace(whole, keys=whole.keys[:count], bags=whole.bags[:count])
        step.store_order(None)
        fixed = step.ordered
        found.append(torch.equal(fixed.keys[:count], whole.keys[:count]))
        found.append(torch.equal(fixed.bags[:count], whole.bags[:count]))
        found.append(bool((fixed.keys[count:] == fixed.first[-1]).all()))
    return found


def test_dlrm_graph_reads_only_this_batch(worlds: Worlds) -> None:
    assert worlds("gloo", 2).run(orders_for_the_graph) == [[True] * 6] * 2
