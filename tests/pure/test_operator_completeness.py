"""Every public operator is complete: kernel, reference, fake, gradient, tests on CPU and GPUs,
bench case, README row."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

import tileweave

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/tileweave"
OPERATORS: tuple[str, ...] = getattr(tileweave, "OPERATORS", ())

KERNELS = {
    "all_gather_matmul": "all_gather/triton.py",
    "matmul_reduce_scatter": "reduce_scatter/triton.py",
    "matmul_all_reduce": "all_reduce/one_shot.py",
    "matmul_all_to_all": "all_to_all/scatter_triton.py",
    "all_to_all_matmul": "all_to_all/gather_triton.py",
    "dispatch_grouped_matmul": "experts/dispatch_triton.py",
    "grouped_matmul_combine": "experts/combine_triton.py",
    "embedding_bag_all_to_all": "embedding/bag_all_to_all.py",
}
TESTS = ("tests/cpu/test_{}.py", "tests/multi/test_{}.py")

for_each_operator = pytest.mark.parametrize("op", OPERATORS)


def is_registered(op: str, *dispatch_keys: str) -> bool:
    """Whether `torch.ops.tileweave.<op>` has a kernel of its own, not a fallback, for one of the
    keys."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(f"tileweave::{op}", key) for key in dispatch_keys)


def test_operator_lists_agree() -> None:
    """The fused call of an operator is in its own file, and every operator has a kernel."""
    fused = {path.stem.removesuffix("_fused") for path in (PACKAGE / "ops").rglob("*_fused.py")}
    public = {re.sub("^embedding_bag_", "bag_", op) for op in OPERATORS}
    assert fused <= public
    assert set(KERNELS) == set(OPERATORS)


@for_each_operator
def test_has_kernel(op: str) -> None:
    assert (PACKAGE / "kernels" / KERNELS[op]).is_file(), f"kernels/{KERNELS[op]} is missing"


@for_each_operator
@pytest.mark.parametrize("file", TESTS)
def test_has_tests(op: str, file: str) -> None:
    assert (ROOT / file.format(op)).is_file(), f"{file.format(op)} is missing"


@for_each_operator
def test_is_public(op: str) -> None:
    assert callable(getattr(tileweave, op, None)), f"tileweave.{op} is missing"


@for_each_operator
def test_has_reference(op: str) -> None:
    reference = importlib.import_module("tileweave.ops.reference")
    assert callable(getattr(reference, op, None)), f"ops/reference.py has no {op}"


@for_each_operator
def test_has_bench_case(op: str) -> None:
    cases = importlib.import_module("tileweave.bench.cases")
    assert op in cases.CASES, f"bench/cases.py has no case for {op}"


@for_each_operator
def test_is_in_the_readme(op: str) -> None:
    assert re.search(rf"\b{op}\b", (ROOT / "README.md").read_text("utf-8")), (
        f"README.md does not mention {op}"
    )


@for_each_operator
def test_has_fake(op: str) -> None:
    assert is_registered(op, "Meta"), f"tileweave::{op} has no fake implementation"


@for_each_operator
def test_has_gradient(op: str) -> None:
    assert is_registered(op, "Autograd", "AutogradCUDA", "AutogradCPU"), (
        f"tileweave::{op} has no autograd registration"
    )
