"""The examples run, as a reader would run them, and say that they are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.behaviour import run_example


def test_neighbour_exchange() -> None:
    assert "largest error" in run_example("neighbour_exchange.py", "3", on_gpu=False)


def test_tensor_parallel_block() -> None:
    output = run_example("tensor_parallel_block.py", "--ranks", "4", "--steps", "4", on_gpu=False)
    assert output.count("step ") == 4
    assert "WRONG" not in output


def test_the_block_as_a_benchmark() -> None:
    """Times mean nothing here; that the variants agree does."""
    words = ("--bench", "--ranks", "2", "--tokens", "32", "--hidden", "64", "--repeats", "1")
    output = run_example("tensor_parallel_block.py", *words, on_gpu=False)
    found = [float(line.rsplit(" ", 1)[1]) for line in output.splitlines() if "differs by" in line]
    assert len(found) == 3
    assert max(found) < 1e-5


def test_a_wrong_block_fails(tmp_path: Path) -> None:
    """The example compares: with another scale on one device it has to say so."""
    text = (Path(__file__).parents[2] / "examples" / "tensor_parallel_block.py").read_text("utf-8")
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace("alone = (whole(x) - target)", "alone = (1.001 * whole(x) - target)"), "utf-8")
    assert "WRONG" in run_example(str(broken), "--ranks", "2", "--steps", "1", on_gpu=False, code=1)


def test_moe_layer_bench(tmp_path: Path) -> None:
    """Output and gradients are those of the unfused layer; times mean nothing here, but they are all there."""
    path = tmp_path / "times.json"
    output = run_example(
        "moe_layer.py", "--bench", "--ranks", "2", "--repeats", "1", "--json", str(path), on_gpu=False
    )  # fmt: skip
    case = json.loads(path.read_text("utf-8"))["cases"][0]
    assert len(case["times"]) == 5 and set(case["differences"]) == {
        "y", "x", "gate.weight", "experts.gate_up_proj", "experts.down_proj"
    }  # fmt: skip
    assert max(case["differences"].values()) < 1e-5 and "WRONG" not in output


INTERACTION = """
import sys, torch
sys.path[:0] = [sys.argv[1]]
import interaction as example
torch.manual_seed(0)
for features, samples in ((7, 3), (18, 2)):
    x, pooled = (torch.randn(samples, n * 16, requires_grad=True) for n in (1, features - 1))
    want, got = example.interaction(x, pooled), example.Interaction.apply(x, pooled)
    gradient = torch.randn_like(want)
    pairs = zip(torch.autograd.grad(want, (x, pooled), gradient), torch.autograd.grad(got, (x, pooled), gradient), strict=True)
    print(max(float((a - b).detach().abs().max()) for a, b in ((want, got), *pairs)))
"""


def test_interaction_of_dlrm() -> None:
    """Its kernels, interpreted, against torch: values and gradients."""
    command = [sys.executable, "-c", INTERACTION, str(Path(__file__).parents[2] / "examples")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    errors = [float(line) for line in done.stdout.split()]
    assert len(errors) == 2 and max(errors) < 1e-4


def test_moe_layer() -> None:
    output = run_example("moe_layer.py", "--style", "deepseek", "--ranks", "2", "--steps", "2", on_gpu=False)
    assert output.count("step ") == 2
    assert "WRONG" not in output
