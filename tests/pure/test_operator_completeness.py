"""Every public operator is complete: kernel, reference, fake, gradient, tests on CPU and GPUs,
bench cases, README row; and no file but one lists the operators."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import tileweave
from tileweave.ops.core.registration import SPECS, spec_of
from tileweave.sim import modelled, predict

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/tileweave"
OPERATORS = tuple(tileweave.OPERATORS)
TESTS = ("tests/cpu/test_{}.py", "tests/multi/test_{}.py")
# The one place that lists the operators, in the order in which everything shows them.
THE_LIST = "ops/__init__.py"
MOST_NAMES = 2  # of operators in one literal


def is_registered(op: str, *dispatch_keys: str) -> bool:
    """Whether `torch.ops.tileweave.<op>` has a kernel of its own, not a fallback, for one of the
    keys."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(f"tileweave::{op}", key) for key in dispatch_keys)


def lacking(op: str) -> list[str]:
    """What the operator does not have, and should."""
    spec, readme = spec_of(op), (ROOT / "README.md").read_text("utf-8")
    samples = importlib.import_module(spec.samples or f"tileweave.bench.samples.{op}").SAMPLES
    there = {
        f"a kernel, {spec.kernel}": find_spec(spec.kernel) is not None,
        "a reference": callable(spec.reference),
        "a public function": getattr(tileweave, op, None) is spec.call,
        "a fake": is_registered(op, "Meta") and is_registered(f"{op}.out", "Meta"),
        "a gradient": is_registered(op, "Autograd", "AutogradCUDA", "AutogradCPU"),
        "a dual that exists": not spec.dual or spec_of(spec.dual).dual == op,
        "bench cases": bool(samples.cases and samples.smoke),
        "a row in README.md": bool(re.search(rf"\b{op}\b", readme)),
        **{path: (ROOT / path).is_file() for path in (test.format(op) for test in TESTS)},
    }
    return [what for what, found in there.items() if not found]


@pytest.mark.parametrize("op", OPERATORS)
def test_operator_is_complete(op: str) -> None:
    assert not lacking(op)


def test_operator_lists_agree() -> None:
    """The fused call of an operator is in its own file, and every operator has its samples."""
    fused = {path.stem.removesuffix("_fused") for path in (PACKAGE / "ops").rglob("*_fused.py")}
    public = {re.sub("^embedding_bag_", "bag_", op) for op in OPERATORS}
    assert fused <= public
    sampled = {path.stem for path in (PACKAGE / "bench/samples").glob("*.py")} - {"__init__"}
    assert sampled == set(OPERATORS)


def test_the_simulator_models_every_operator() -> None:
    assert set(modelled.MODELLED) == set(OPERATORS)
    assert set(OPERATORS) <= set(predict._MODELS)


def test_every_operator_is_explored() -> None:
    search = pytest.importorskip("tileweave.explore.search")
    assert set(OPERATORS) <= {scenario.op for scenario in search.SCENARIOS}


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="registered already"):
        importlib.import_module("tileweave.ops.core.registration").register(SPECS[OPERATORS[0]])


# --- Nothing lists the operators ---


def lists_of_operators(text: str) -> Iterator[tuple[int, set[str]]]:
    """Line and names of every dict, tuple, list or set in a source file with more than
    `MOST_NAMES` operators in it, also by names of constants. What a module exports does not
    count."""
    tree = ast.parse(text)
    constants, exports = {}, set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = node.value
            if node.targets[0].id == "__all__":
                exports.add(node.value)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            names = getattr(node.targets[0], "elts", ())
            constants.update(
                {getattr(n, "id", ""): v for n, v in zip(names, node.value.elts, strict=False)}
            )

    def name_of(node: ast.AST | None) -> str:
        if isinstance(node, ast.Name):
            value = constants.get(node.id)
            return value.value if isinstance(value, ast.Constant) else node.id
        if isinstance(node, ast.Attribute):
            return node.attr
        return node.value if isinstance(node, ast.Constant) else ""

    def elements(node: ast.AST) -> list[ast.AST | None]:
        if isinstance(node, ast.Dict):
            return [*node.keys, *node.values]
        return [*node.elts] if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else []

    for node in ast.walk(tree):
        found = {name_of(element) for element in elements(node)} & set(OPERATORS)
        if len(found) > MOST_NAMES and node not in exports:
            yield node.lineno, found


def test_one_place_lists_the_operators() -> None:
    found = [
        f"{path.relative_to(PACKAGE).as_posix()}:{line}: {', '.join(sorted(names))}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, names in lists_of_operators(path.read_text("utf-8"))
    ]
    assert len(found) == 1 and found[0].startswith(THE_LIST), "\n".join(["", *found])


A, B, C = OPERATORS[:3]


@pytest.mark.parametrize(
    "text",
    [
        f"X = ('{A}', '{B}', '{C}')",
        f"X = {{'{A}': 1, '{B}': 2, '{C}': 3}}",
        f"X = {{1: '{A}', 2: '{B}', 3: '{C}'}}",
        f"def f():\n    return ['{A}', 'other', '{B}', '{C}']",
        f"A, B, C = '{A}', 'x', '{C}'\nX = {{A, '{B}', C}}",
        f"X = '{A}'\nY = (X, ops.{B}, {C})",
    ],
)
def test_a_list_of_operators_is_noticed(text: str) -> None:
    assert list(lists_of_operators(text))


@pytest.mark.parametrize(
    "text",
    [f"__all__ = ['{A}', '{B}', '{C}']", f"X = ('{A}', '{B}', '{A}')", f"f('{A}', '{B}', '{C}')"],
)
def test_what_lists_no_operators_passes(text: str) -> None:
    assert not list(lists_of_operators(text))
