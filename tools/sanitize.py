"""Run compute-sanitizer over every kernel that runs on one GPU: ``python tools/sanitize.py``.

Three tools (memcheck, synccheck, racecheck) watch the tests of ``tests/gpu``, and those of
``tests/multi`` with two ranks that share one GPU. At the end a table says what each tool reported,
and which kernels of the package were never compiled, so that nothing looked at them.

racecheck knows one pair of accesses that is no race: the word with which Triton tells the warps of
a Gluon kernel's ``warp_specialize`` what to run, written before a barrier and read after it. So its
reports count where they are not in a Gluon kernel; the others are listed.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "synccheck", "racecheck")
SUITES = {
    "tests/gpu": ["tests/gpu"],
    "tests/multi, two ranks on one GPU": ["tests/multi", "--one-gpu", "2"],
}
ERRORS = re.compile(r"^=+ ERROR SUMMARY: (\d+) error", re.MULTILINE)
HAZARDS = re.compile(r"^=+ (?:Error|Warning): .*?[Rr]ace.*?(?:at|in) (\w+)", re.MULTILINE)


@dataclass
class Found:
    """What a tool reported in a suite: errors, hazards by kernel, and how the tests ended."""

    tool: str
    suite: str
    errors: int = 0
    hazards: Counter[str] = field(default_factory=Counter)
    tests: str = ""
    summaries: int = 0

    def wrong(self, gluon: set[str]) -> int:
        """Reports that count."""
        if self.tool != "racecheck":
            return self.errors
        return sum(count for kernel, count in self.hazards.items() if kernel not in gluon)


def read(tool: str, suite: str, output: str) -> Found:
    """What the output of a run says."""
    found = Found(tool, suite, hazards=Counter(HAZARDS.findall(output)))
    counts = [int(count) for count in ERRORS.findall(output)]
    found.errors = sum(counts)
    found.summaries = len(counts) + output.count("RACECHECK SUMMARY")
    lines = re.findall(r"^(?:\d+ \w+,? ?)+ in [\d.]+s.*$", output, re.MULTILINE)
    found.tests = lines[-1] if lines else "the tests did not end"
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


def run(tool: str, suite: str, seconds: float, cache: Path, sanitizer: str) -> Found:
    """The tests of ``suite`` under ``tool``."""
    command = [
        *(sanitizer, "--tool", tool, "--target-processes", "all", "--report-api-errors", "no"),
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITES[suite]),
    ]
    environment = os.environ | {"TILEWEAVE_TIMEOUT": "600", "TRITON_CACHE_DIR": str(cache)}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            print(f"{tool}, {suite}: not done after {seconds:g} s")
        output.seek(0)
        return read(tool, suite, output.read())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all")
    parser.add_argument("--suite", choices=SUITES, action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=1800.0, help="limit of one run")
    asked = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit(
            "error: asked: compute-sanitizer; allowed: where the CUDA toolkit is installed; "
            "remedy: install it, and put its folder bin into PATH"
        )
    known = kernels()
    gluon = {name for name, kind in known.items() if kind == "gluon"}
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="tileweave-sanitize-") as folder:
        for tool in asked.tool or TOOLS:
            for suite in asked.suite or SUITES:
                found = run(tool, suite, asked.seconds, Path(folder), sanitizer)
                counted = found.wrong(gluon)
                # without a summary the tool has looked at nothing
                wrong += counted + (found.summaries == 0)
                print(
                    f"{tool:10} {suite}: {counted} reports, {found.summaries} processes; tests: "
                    f"{found.tests}; {dict(found.hazards) or 'no hazards'}",
                    flush=True,
                )
        missing = sorted(set(known) - compiled(Path(folder)))
    print(f"kernels: {len(known)}, never compiled: {', '.join(missing) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
