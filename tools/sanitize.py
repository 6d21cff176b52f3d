"""Run compute-sanitizer over every kernel that runs on one GPU: ``python tools/sanitize.py``.

Three tools (memcheck, synccheck, racecheck) watch the tests of ``tests/gpu``, and those of
``tests/multi`` with two ranks that share one GPU. Each test file is a run of its own; ``--jobs`` of
them run at a time, on the visible GPUs in turn. At the end a table says what each tool reported,
and which kernels of the package were never compiled, so that nothing looked at them. It ends with
1 if a tool reported something, or if a run did not end.

Tests of absent ranks are left out: they are about time limits, which a sanitizer exceeds.

racecheck knows one pair of accesses that is no race: the word with which Triton tells the warps of
a Gluon kernel's ``warp_specialize`` what to run, written before a barrier and read after it. It
also reports kernels of cuBLAS. So its reports count in Triton kernels of the package; the others
are listed.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "synccheck", "racecheck")
# folder -> options of pytest
SUITES = {
    "tests/gpu": (),
    "tests/multi": ("--one-gpu", "2", "-k", "not never_calls and not absent"),
}
ERRORS = re.compile(r"^=+ ERROR SUMMARY: (\d+) error", re.MULTILINE)
HAZARDS = re.compile(r"^=+ (?:Error|Warning): .*?[Rr]ace.*?(?:at|in) (\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """A test file under a tool."""

    tool: str
    suite: str
    file: str


@dataclass
class Found:
    """What a tool reported in a run: errors, hazards by kernel, and how the tests ended.

    summaries : processes that the tool has looked at until their end.
    """

    run: Run
    errors: int = 0
    hazards: Counter[str] = field(default_factory=Counter)
    tests: str = ""
    summaries: int = 0

    @property
    def ended(self) -> bool:
        """Whether the tests ended, and the tool has said so."""
        return bool(self.tests) and self.summaries > 0

    def wrong(self, triton: set[str]) -> int:
        """Reports that count. ``triton``: the Triton kernels of the package."""
        if self.run.tool != "racecheck":
            return self.errors
        return sum(count for kernel, count in self.hazards.items() if kernel in triton)


def read(run: Run, output: str) -> Found:
    """What the output of a run says."""
    found = Found(run, hazards=Counter(HAZARDS.findall(output)))
    counts = [int(count) for count in ERRORS.findall(output)]
    found.errors = sum(counts)
    found.summaries = len(counts) + output.count("RACECHECK SUMMARY")
    lines = re.findall(r"^(?:=* ?)((?:\d+ \w+,? ?)+ in [\d.]+s)", output, re.MULTILINE)
    found.tests = lines[-1] if lines else ""
    return found


def kernels() -> dict[str, str]:
    """The kernels of the package: name, and "triton" or "gluon"."""
    found = {}
    for path in (ROOT / "src" / "tileweave").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                text = " ".join(ast.unparse(each) for each in node.decorator_list)
                if ".jit" in text or text.startswith("jit"):
                    found[node.name] = "gluon" if "gluon" in text else "triton"
    return found


def compiled(cache: Path) -> set[str]:
    """The kernels that Triton has compiled into ``cache``."""
    return {path.stem for path in cache.rglob("*.cubin")}


def runs(tools: list[str], suites: list[str]) -> list[Run]:
    """A run per tool and test file; the slowest tool and the largest files first."""
    files = [(suite, file) for suite in suites for file in (ROOT / suite).glob("test_*.py")]
    files.sort(key=lambda each: -each[1].stat().st_size)
    return [Run(tool, suite, file.name) for tool in tools for suite, file in files]


def gpus() -> list[str]:
    """The visible GPUs, as CUDA_VISIBLE_DEVICES names them."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    import torch

    return [str(number) for number in range(max(torch.cuda.device_count(), 1))]


def watch(run: Run, seconds: float, cache: Path, sanitizer: str, gpu: str) -> Found:
    """Run the tests of a file under the tool."""
    command = [
        *(sanitizer, "--tool", run.tool, "--target-processes", "all", "--report-api-errors", "no"),
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *(f"{run.suite}/{run.file}", *SUITES[run.suite]),
    ]
    environment = os.environ | {
        "TILEWEAVE_TIMEOUT": "600",
        "TRITON_CACHE_DIR": str(cache),
        "CUDA_VISIBLE_DEVICES": gpu,
    }
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks, too
            process.wait()
        output.seek(0)
        return read(run, output.read())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all")
    parser.add_argument("--suite", choices=SUITES, action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=1800.0, help="limit of one test file")
    jobs = max((os.cpu_count() or 1) // 4, 1)
    parser.add_argument("--jobs", type=int, default=jobs, help="test files at a time")
    asked = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit(
            "error: asked: compute-sanitizer; allowed: where the CUDA toolkit is installed; "
            "remedy: install it, and put its folder bin into PATH"
        )
    known = kernels()
    triton = {name for name, kind in known.items() if kind == "triton"}
    todo, devices = runs(asked.tool or list(TOOLS), asked.suite or list(SUITES)), gpus()
    wrong = done = 0
    with (
        tempfile.TemporaryDirectory(prefix="tileweave-sanitize-") as folder,
        ThreadPoolExecutor(max(asked.jobs, 1)) as pool,
    ):
        cache = Path(folder)
        running = [
            pool.submit(watch, run, asked.seconds, cache, sanitizer, devices[n % len(devices)])
            for n, run in enumerate(todo)
        ]
        for each in as_completed(running):
            found, done = each.result(), done + 1
            counted = found.wrong(triton)
            wrong += counted + (not found.ended)
            hazards = f"; hazards {dict(found.hazards)}" if found.hazards else ""
            print(
                f"{done:3}/{len(todo)} {found.run.tool:10} {found.run.suite}/{found.run.file}: "
                f"{counted} reports, {found.summaries} processes; "
                f"{found.tests or 'DID NOT END'}{hazards}",
                flush=True,
            )
        missing = sorted(set(known) - compiled(cache))
    print(f"kernels: {len(known)}, never compiled: {', '.join(missing) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
