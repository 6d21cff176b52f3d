"""The interpreter without what it does over and over (``language/patched.py``) does what Triton's own does."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.worlds import ROOT, environment_for


@triton.jit
def weighted(values, weight):
    return tl.sum(values * weight, axis=0) + tl.max(values, axis=0)


@triton.jit
def kernel(x, out, n, SIZE: tl.constexpr):
    rows = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    values = tl.load(x + rows[:, None] * SIZE + tl.arange(0, SIZE)[None, :], mask=rows[:, None] < n, other=1.0)
    narrow = values.to(tl.bfloat16).to(tl.float32)
    tl.store(out + rows, weighted(tl.dot(narrow, values.trans()), 2.0) + narrow.shape[0] * n, mask=rows < n)


@triton.jit
def faulty(x, n):
    tl.store(x + tl.arange(0, 8), tl.arange(0, 4) + n)


def run(patched: bool) -> dict[str, object]:
    """In a process of its own: what a kernel computes, what is left of the language, how often Triton patched it."""
    from triton.runtime import interpreter

    patches = 0
    patch = interpreter._patch_lang

    def counting(fn: object) -> object:
        nonlocal patches
        patches += 1
        return patch(fn)

    interpreter._patch_lang = counting
    if patched:
        from tileweave.language import patched as module

        module.patch_once()
    places = (tl, tl.core, tl.math, tl.tensor)
    before = [(place, name, member) for place in places for name, member in vars(place).items()]
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((37, 16)).astype(np.float32))
    out = torch.zeros(37)
    for _ in range(2):
        kernel[(3,)](x, out, 37, SIZE=16)
    told = ""
    try:
        faulty[(1,)](out, 3)
    except interpreter.InterpreterError as error:
        told = str(error)
    changed = [name for place, name, member in before if vars(place)[name] is not member]
    return {"out": out.tolist(), "told": told, "patches": patches, "changed": changed}


@pytest.fixture(scope="module")
def both() -> list[dict]:
    found = []
    for patched in (True, False):
        code = f"import json; from tests.cpu.test_patched import run; print(json.dumps(run({patched})))"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment_for("gloo", {}), cwd=ROOT, capture_output=True, text=True, check=True,
            timeout=60,
        )  # fmt: skip
        found.append(json.loads(done.stdout))
    return found


def test_kernels_compute_the_same(both: list[dict]) -> None:
    ours, tritons = both
    assert ours["out"] == tritons["out"] and any(ours["out"])


def test_errors_are_the_same(both: list[dict]) -> None:
    ours, tritons = both
    assert ours["told"] == tritons["told"] != ""


def test_the_language_is_as_before(both: list[dict]) -> None:
    """Triton looks it through at each call; here that happens once."""
    ours, tritons = both
    assert not ours["changed"]
    assert ours["patches"] == 1 < 3 * 2 * 2 < tritons["patches"]
