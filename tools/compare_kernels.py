"""Compare the instructions of all kernels that the tests of two source trees compile.

It shows, without a GPU, that a refactoring changes no kernel::

    python tools/compare_kernels.py record OLD_TREE old.json
    python tools/compare_kernels.py record NEW_TREE new.json
    python tools/compare_kernels.py compare old.json new.json

``record`` runs ``tests/compile`` of a tree and listens to Triton's compiler, so the tree need not
know this script. To record a part, name test files or give ``-k``; ``compare`` leaves out what was
not run. Kernels that were renamed are given as old and new name::

    python tools/compare_kernels.py record NEW_TREE new.json tests/compile/test_experts.py
    python tools/compare_kernels.py compare old.json new.json --renamed push_kernel=send_kernel
    python tools/compare_kernels.py compare old.json new.json --show count_kernel

``compare`` exits with 0 if the kernels are the same, 1 if they differ, and 2 if a recording is
incomplete because a test failed.

What is compared is a normalised text:

- NVIDIA: PTX without comments, debug information, declarations of registers and parameters, and
  loads of parameters. A register that only ever holds one parameter gets the name of that
  parameter. Parameters, registers, labels, and functions are numbered by first use, and operands
  of additions and the like are sorted by it, so neither names nor the order of parameters matter.
- AMD: optimised LLVM IR with the same changes. Its assembly loads several parameters at once into
  physical registers, and both depend on the order of the parameters.

The first line of a text has the shared memory and the number of warps. Registers and spills are
recorded too; where they differ between kernels with the same text, ``compare`` prints a note.

Kernels are matched by name, target, and text. Two variants of one kernel that were exchanged are
found by the tests that compiled them, where both trees have tests of the same names.

The texts are kept, for ``--show``, in a folder next to the recording: ``old`` for ``old.json``.
Triton's cache is used (``TRITON_CACHE_DIR``): kernels whose source did not change are not compiled
again, but recorded.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Environment variables that tell the processes of pytest where to write.
PARTS = "COMPARE_KERNELS_PARTS"
TEXTS = "COMPARE_KERNELS_TEXTS"

Kernel = dict[str, Any]
Key = tuple[str, str, str]  # name, target, hash of the text
Variant = tuple[str, str]  # target, hash of the text

# --- Normalised texts ---

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
DEBUG_SECTION = re.compile(r"^\s*\.section\s+\.debug\w*\s*\{.*?^\s*\}", re.DOTALL | re.MULTILINE)
DEBUG_LINE = re.compile(r"^\s*\.(?:file|loc|version|target|address_size)\b[^\n]*$", re.MULTILINE)
ENTRY = re.compile(r"(\.entry\s+)([\w$]+)\s*\(.*?\)", re.DOTALL)
FUNCTION = re.compile(r"\.func\s+(?:\([^)]*\)\s*)?([\w$]+)")
REGISTERS = re.compile(r"\.reg\s+\.\w+\s+(%[a-z]+)<\d+>\s*;")
LABEL = re.compile(r"(?<![:.\w$%])([A-Za-z_$][\w$]*):(?!:)")
PARAMETER = re.compile(
    r"(?:ld\.param[.\w]*|mov\.[bu]\d+) (%[a-z]+\d+),\[?([\w$]+_param_\d+(?:\+\d+)?)\]?;"
)
IS_PARAMETER = re.compile(r"[\w$]+_param_\d+(\$\d+)?")
PTX_COMMUTES = re.compile(
    r"(?:@!?\S+ )?(?:(?:add|mul|mad|fma|and|or|xor|min|max)\.|setp\.(?:eq|ne)\.)\S* [^,]+,"
    r"(?P<a>[%\w$]+),(?P<b>[%A-Za-z_$][\w$]*)[,;].*"
)
LLIR_COMMUTES = re.compile(
    r"%\S+ = (?:(?:add|mul|and|or|xor|fadd|fmul|icmp (?:eq|ne)) "
    r".*?(?P<a>%[\w.$-]+), (?P<b>%[\w.$-]+)"
    r"|(?:tail )?call .*?@llvm\.(?:[su]min|[su]max|minnum|maxnum|minimum|maximum|fma|fmuladd)\."
    r"[\w.]+\((?:<[^>]*>|\w+) (?P<c>%[\w.$-]+), (?:<[^>]*>|\w+) (?P<d>%[\w.$-]+)[,)].*)"
    r"(?: ![\w.]+)*"
)
REGISTER = re.compile(r"%[a-z]+\d+\b")
HEAD = re.compile(r"(?:\.\w+ )*\.(?:entry|func)\b[^{]*")
NAME = re.compile(r"%[a-z]+\d+\b|(?<![.\w$%])[A-Za-z_$][\w$]*")
QUOTED = r'"(?:[^"\\]|\\.)*"'
LLIR_NAME = re.compile(rf"{QUOTED}|%[\w.$-]+|@[\w.$-]+")
DEFINES = re.compile(r"(?:@!?\S+ )?\S+ (%[a-z]+\d+|\{[^}]*\})")


class Numbers(dict[str, str]):
    """Short names for what is renamed, counted by kind in order of first use."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()

    def number(self, name: str, kind: str) -> str:
        if name not in self:
            self._count[kind] += 1
            self[name] = f"{kind}{self._count[kind]}"
        return self[name]


def normalise_ptx(ptx: str) -> list[str]:
    """Lines of a PTX module, one instruction each, without what depends on names of parameters."""
    text = DEBUG_LINE.sub("", DEBUG_SECTION.sub("", COMMENT.sub("", ptx)))
    functions = {found[1] for found in FUNCTION.finditer(text)}
    functions |= {found[2] for found in ENTRY.finditer(text)}
    text = ENTRY.sub(r"\1\2()", text)
    banks = set(REGISTERS.findall(text))
    text = REGISTERS.sub("", text)
    labels, used = Counter(LABEL.findall(text)), Counter(NAME.findall(text))
    unused = {f"{label}:" for label, count in labels.items() if used[label] == count}

    lines: list[str] = []
    held: defaultdict[str, set[str]] = defaultdict(set)  # register -> parameters loaded into it
    for line in _statements(text):
        if load := PARAMETER.fullmatch(line):
            held[load[1]].add(load[2].replace("+", "$"))
        elif line not in unused:
            lines.append(line)
    # A register that holds a parameter and nothing else is named after it. A register that only
    # starts with a parameter, such as a loop's counter, is listed at the end.
    results = [found[1] for line in lines if (found := DEFINES.match(line))]
    written = {register for result in results for register in REGISTER.findall(result)}
    names = {
        register: next(iter(parameters))
        for register, parameters in held.items()
        if len(parameters) == 1 and register not in written
    }

    lines = [NAME.sub(lambda found: names.get(found[0], found[0]), line) for line in lines]
    numbers = Numbers()

    def rename(found: re.Match[str]) -> str:
        name = found[0]
        if name in labels:
            return numbers.number(name, "LABEL")
        if name in functions:
            return numbers.number(name, "FUNCTION")
        if IS_PARAMETER.fullmatch(name):
            return numbers.number(name, "PARAM")
        bank = name.rstrip("0123456789")
        return numbers.number(name, bank) if bank in banks else name

    result = [NAME.sub(rename, line) for line in _sort_operands(lines, NAME, PTX_COMMUTES)]
    first_use = {name: index for index, name in enumerate(numbers)}
    started = [register for register in held if register in first_use and register not in names]
    starts = [(register, name) for register in started for name in sorted(held[register])]
    starts.sort(key=lambda start: [first_use.get(name, len(first_use)) for name in start])
    for register, name in starts:
        result.append(f"start {numbers[register]} = {numbers.number(name, 'PARAM')}")
    return result


def _statements(text: str) -> Iterable[str]:
    """Statements, labels, braces, and heads of functions, one by one, with little space."""
    for statement in re.split(r"(?<=;)", text):
        rest = re.sub(r" ?([,+]) ?|([\[({]) | (?=[\])};])", r"\1\2", " ".join(statement.split()))
        while rest and rest != ";":
            found = HEAD.match(rest) or LABEL.match(rest) or re.match(r"[{}]", rest)
            if not found:
                yield rest
                break
            yield found[0].strip()
            rest = rest[found.end() :].strip()


def normalise_llir(llir: str) -> list[str]:
    """Lines of an LLVM module's functions, without what depends on names of parameters."""
    text = re.sub(rf"({QUOTED})|;[^\n]*", lambda found: found[1] or "", llir)
    attributes = dict(re.findall(r"^attributes (#\d+) = (.*)$", text, re.MULTILINE))
    functions = Numbers()
    for name in re.findall(r"^define .*?(@[\w.$]+)\(", text, re.MULTILINE):
        functions.number(name, "@FUNCTION")
    values = Numbers()

    def rename(found: re.Match[str]) -> str:
        if found[0].startswith("%"):
            return values.number(found[0], "%")
        return functions.get(found[0], found[0])  # what is quoted stays as it is

    result: list[str] = []
    for line in text.splitlines():
        line = " ".join(line.split())
        if not line or line.startswith(
            ("declare ", "attributes ", "!", "source_filename", "target ")
        ):
            continue
        if head := re.match(r"define .*?(@[\w.$]+)\(.*?(#\d+)?(?: !dbg !\d+)? \{$", line):
            line = f"define {head[1]} {attributes.get(head[2], '')}"
        line = re.sub(r",? !dbg !\d+", "", line)
        line = re.sub(r",? (![\w.]+) !\d+", r" \1", line)
        line = re.sub(r" #\d+\b", "", line)
        result.append(re.sub(r"^([\w.$-]+):", r"%\1:", line))
    result = _sort_operands(result, LLIR_NAME, LLIR_COMMUTES)
    return [LLIR_NAME.sub(rename, line) for line in result]


def _sort_operands(lines: list[str], name: re.Pattern[str], commutes: re.Pattern[str]) -> list[str]:
    """Lines with the operands of additions and the like in an order that does not depend on names.

    LLVM sorts them by the position of parameters, among other things. Here, the operand whose uses
    come first goes first, and which of two such operands it is does not count as another use.
    """
    uses: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    pairs: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
    for index, line in enumerate(lines):
        if found := commutes.fullmatch(line):
            first, second = ("a", "b") if found["a"] else ("c", "d")
            pairs[index] = (found.span(first), found.span(second))
        for position, word in enumerate(name.finditer(line)):
            uses[word[0]].append((index, -1 if word.span() in pairs.get(index, ()) else position))
    result = list(lines)
    for index, ((begin, end), (other_begin, other_end)) in pairs.items():
        line = lines[index]
        first, second = line[begin:end], line[other_begin:other_end]
        if uses[second] < uses[first]:
            between = line[end:other_begin]
            result[index] = line[:begin] + second + between + first + line[other_end:]
    return result


def is_instruction(line: str) -> bool:
    return not (re.match(r"[.{}]|start |define |@\S+ = ", line) or line.endswith(":"))


# --- Recording, in the process of pytest ---


class Recorder:
    """A pytest plugin that notes each kernel Triton compiles or reads from its cache."""

    def __init__(self, parts: Path, texts: Path) -> None:
        self.parts, self.texts = parts, texts
        self.kernels: dict[Key, Kernel] = {}
        self.tests: list[str] = []
        self.failed: set[str] = set()
        self.seconds: defaultdict[str, float] = defaultdict(float)  # of CPU time, by test file
        self.started = 0.0

    def on_compiled(
        self, *, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any
    ) -> None:
        """Triton calls this."""
        files = {path.suffix[1:]: path for path in map(Path, metadata_group.values())}
        arch = metadata["target"].arch
        name, target = metadata["name"], f"sm_{arch}" if isinstance(arch, int) else str(arch)
        if "ptx" in files:
            lines, usage = normalise_ptx(files["ptx"].read_text()), _cubin_usage(files.get("cubin"))
        else:
            lines, usage = normalise_llir(files["llir"].read_text()), _amd_usage(files["amdgcn"])
        head = ("shared", "num_warps", "num_ctas", "tmem_size")
        head = ", ".join(f"{key} {metadata[key]}" for key in head if key in metadata)
        text = "\n".join([head, *lines, ""])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        if (name, target, digest) not in self.kernels:
            (self.texts / f"{digest}.txt").write_text(text)
            self.kernels[name, target, digest] = {
                "name": name,
                "target": target,
                "hash": digest,
                "instructions": sum(map(is_instruction, lines)),
                "shared": metadata["shared"],
                "registers": usage[0],
                "spills": usage[1],
                "tests": [],
            }
        tests = self.kernels[name, target, digest]["tests"]
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        if test not in tests:
            tests.append(test)

    def pytest_collection_finish(self, session: Any) -> None:
        self.tests = [item.nodeid for item in session.items]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_runtest_logstart(self) -> None:
        self.started = _cpu_seconds()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid.partition("::")[0]] += _cpu_seconds() - self.started

    def pytest_runtest_logreport(self, report: Any) -> None:
        if hasattr(report, "node"):  # pytest-xdist: the report of another process
            return
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        part = {
            "kernels": list(self.kernels.values()),
            "tests": self.tests,
            "failed": sorted(self.failed),
            "seconds": dict(self.seconds),
        }
        (self.parts / f"{os.getpid()}.json").write_text(json.dumps(part))


def pytest_configure(config: Any) -> None:
    """Makes this file a plugin, for ``pytest -p compare_kernels``."""
    from triton import knobs

    import tileweave

    package = Path(str(tileweave.__file__)).resolve()
    if config.rootpath.resolve() not in package.parents:
        raise RuntimeError(f"the tests of {config.rootpath} would run with {package}")
    recorder = Recorder(Path(os.environ[PARTS]), Path(os.environ[TEXTS]))
    knobs.compilation.listener = recorder.on_compiled
    config.pluginmanager.register(recorder, "kernel-recorder")


def _cpu_seconds() -> float:
    """Of this process and of those it waited for: assemblers."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _cubin_usage(cubin: Path | None) -> tuple[int | None, int | None]:
    """Registers per thread, and bytes of stack and local memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if cubin is None or not tool.exists():
        return None, None
    command = [str(tool), "--dump-resource-usage", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
    return (int(used[1]), int(used[2]) + int(used[3])) if used else (None, None)


def _amd_usage(assembly: Path) -> tuple[int | None, int | None]:
    """VGPRs, and spilled ones."""
    text = assembly.read_text()
    registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
    spills = re.search(r"\.vgpr_spill_count:\s*(\d+)", text)
    return int(registers[1]) if registers else None, int(spills[1]) if spills else None


# --- Recording, from the command line ---


def record(args: argparse.Namespace) -> int:
    """Run a tree's tests and write down what they compiled. Returns the exit status."""
    tree, texts = args.tree.resolve(), args.out.with_suffix("").resolve()
    texts.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(__file__).parent.resolve(), tree / "src", tree]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "TRITON_DISABLE_LINE_INFO": "1",
            PARTS: folder,
            TEXTS: str(texts),
        }
        env.pop("TRITON_INTERPRET", None)  # it would replace kernels by interpreted functions
        command = [sys.executable, "-m", "pytest", "-q", "-p", "compare_kernels", *args.files]
        command += ["-o", "timeout=0"]  # a busy machine shall not leave kernels out
        command += ["-n", str(args.workers), "--dist", "loadfile"] if args.workers else []
        command += ["-k", args.select] if args.select else []
        status = subprocess.run(command, cwd=tree, env=env, check=False).returncode
        parts = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]

    kernels: dict[Key, Kernel] = {}
    seconds: defaultdict[str, float] = defaultdict(float)
    for part in parts:
        for file, time in part["seconds"].items():
            seconds[file] += time
        for kernel in part["kernels"]:
            known = kernels.setdefault((kernel["name"], kernel["target"], kernel["hash"]), kernel)
            known["tests"] = list(dict.fromkeys([*known["tests"], *kernel["tests"]]))
    describe = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--exclude=*"]
    failed = sorted({test for part in parts for test in part["failed"]})
    recording = {
        "commit": subprocess.run(describe, capture_output=True, text=True).stdout.strip(),
        "files": args.files,
        "select": args.select,
        "is_complete": status == 0,
        "failed": failed,
        "tests": sorted({test for part in parts for test in part["tests"]}),
        "seconds": {file: round(seconds[file], 1) for file in sorted(seconds)},
        "kernels": [kernels[key] for key in sorted(kernels)],
    }
    args.out.write_text(json.dumps(recording, indent=1) + "\n")
    for file, time in recording["seconds"].items():
        print(f"{time:8.1f} s of CPU time  {file}")
    names = {name for name, _, _ in kernels}
    print(f"{len(kernels)} variants of {len(names)} kernels in {args.out}, texts in {texts}")
    if status:
        print(f"incomplete: pytest ended with {status}; failed: {', '.join(failed) or 'no test'}")
    return 2 if status else 0


# --- Comparing ---


class Recording:
    """A recording, with kernels under their new names."""

    def __init__(self, path: Path, renamed: Mapping[str, str]) -> None:
        self.path = path
        self._data = json.loads(path.read_text())
        self.is_complete: bool = self._data["is_complete"]
        self.failed: list[str] = self._data["failed"]
        self.variants: defaultdict[str, dict[Variant, Kernel]] = defaultdict(dict)
        # (test, name, target) -> hashes
        self.by_test: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
        for kernel in self._data["kernels"]:
            name = renamed.get(kernel["name"], kernel["name"])
            self.variants[name][kernel["target"], kernel["hash"]] = kernel
            for test in kernel["tests"]:
                self.by_test[test, name, kernel["target"]].add(kernel["hash"])

    def would_have(self, kernel: Kernel) -> bool:
        """Whether tests that compile this kernel of another recording were selected for this."""
        files = self._data["files"]
        if self._data["select"]:
            return any(test in self._data["tests"] for test in kernel["tests"])
        if not any(file.endswith(".py") for file in files):
            return True
        return any(test.partition("::")[0] in files for test in kernel["tests"])

    def lacks(self, name: str, other: Recording) -> list[Variant]:
        """The variants of a kernel in another recording which should be in this one."""
        return [
            variant
            for variant, kernel in other.variants[name].items()
            if variant not in self.variants[name] and self.would_have(kernel)
        ]

    def text(self, variant: Variant) -> list[str]:
        return (self.path.with_suffix("") / f"{variant[1]}.txt").read_text().splitlines()


def compare(old: Recording, new: Recording) -> bool:
    """Print the differences, kernel by kernel. Returns whether the kernels are the same."""
    is_same, total = True, Counter[str]()
    columns = ("old", "new", "same", "only old", "only new", "not run")
    print(f"{'kernel':44}", *(f"{column:>8}" for column in columns))
    for name in sorted({*old.variants, *new.variants}):
        before, after = old.variants[name], new.variants[name]
        both, only_old, only_new = (
            before.keys() & after.keys(),
            new.lacks(name, old),
            old.lacks(name, new),
        )
        not_run = len(before.keys() ^ after.keys()) - len(only_old) - len(only_new)
        counts = (len(before), len(after), len(both), len(only_old), len(only_new), not_run)
        total.update(dict(zip(columns, counts, strict=True)))
        differs = bool(only_old or only_new)
        is_same &= not differs
        print(f"{name:44}", *(f"{count:8}" for count in counts), " DIFFERS" * differs)
        for variant in sorted(both):
            for key in ("registers", "spills"):
                then, now = before[variant][key], after[variant][key]
                if then != now:
                    print(
                        f"    note: {' '.join(variant)}: {key} {then} -> {now}, with the same text"
                    )
    for test, name, target in exchanged(old, new):
        is_same = False
        print(
            f"DIFFERS: {test} compiles another variant of {name} for {target}; both trees have both"
        )
    print(f"{'total':44}", *(f"{total[column]:8}" for column in columns))
    print("same" if is_same else "different")
    return is_same


def exchanged(old: Recording, new: Recording) -> list[tuple[str, str, str]]:
    """(test, kernel, target) where a test compiles another variant, and both trees have both."""
    result = []
    for key in sorted(old.by_test.keys() & new.by_test.keys()):
        before, after = old.by_test[key], new.by_test[key]
        _, name, target = key
        known = old.variants[name].keys() & new.variants[name].keys()
        is_known = all((target, digest) in known for digest in before | after)
        if is_known and len(before) == len(after) and before != after:
            result.append(key)
    return result


def show(old: Recording, new: Recording, name: str) -> None:
    """Print how the first variant that only the old tree has differs from the closest new one."""
    for variant in new.lacks(name, old):
        target = variant[0]
        candidates = [other for other in old.lacks(name, new) if other[0] == target]
        if not candidates:
            continue
        kernel, lines = old.variants[name][variant], old.text(variant)
        bag = Counter(map(masked, lines))

        def likeness(
            other: Variant, tests: list[str] = kernel["tests"], bag: Counter[str] = bag
        ) -> tuple[int, int]:
            theirs = Counter(map(masked, new.text(other)))
            shared_tests = set(tests) & set(new.variants[name][other]["tests"])
            return len(shared_tests), 2 * (bag & theirs).total() - theirs.total()

        best = max(candidates, key=likeness)
        print(f"{name} for {target}, {variant[1]} -> {best[1]}, of {', '.join(kernel['tests'])}")
        print("\n".join(difference(lines, new.text(best))))
        return
    print(f"{name} has no variants to compare")


def masked(line: str) -> str:
    """A line without the numbers of registers and labels: one more instruction moves them all."""
    return re.sub(r"(%[a-z]*|PARAM|LABEL|FUNCTION)\d+", r"\1", line)


def difference(old: list[str], new: list[str]) -> list[str]:
    """Unified diff of two texts, without numbers of registers unless only these differ."""
    pair = [masked(line) for line in old], [masked(line) for line in new]
    pair = pair if pair[0] != pair[1] else (old, new)
    return list(difflib.unified_diff(*pair, "old", "new", lineterm=""))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="write down the kernels that a tree's tests compile")
    one.add_argument("tree", type=Path)
    one.add_argument("out", type=Path, help="a .json file; texts go to the folder of that name")
    one.add_argument(
        "files", nargs="*", default=["tests/compile"], help="of the tree (default: tests/compile)"
    )
    one.add_argument("-k", dest="select", help="select tests by name, as pytest does")
    one.add_argument("-n", dest="workers", type=int, default=0, help="processes of pytest-xdist")
    two = commands.add_parser("compare", help="compare two recordings")
    two.add_argument("old", type=Path)
    two.add_argument("new", type=Path)
    two.add_argument(
        "--renamed", nargs="*", default=[], metavar="OLD=NEW", help="kernels with another name"
    )
    two.add_argument("--show", metavar="KERNEL", help="print how this kernel (new name) differs")
    args = parser.parse_args(arguments)
    if args.command == "record":
        return record(args)

    renamed = dict(pair.split("=", 1) for pair in args.renamed)
    old, new = Recording(args.old, renamed), Recording(args.new, {})
    is_same = compare(old, new)
    if args.show:
        show(old, new, args.show)
    for recording in (old, new):
        if not recording.is_complete:
            failed = ", ".join(recording.failed) or "pytest was interrupted"
            print(f"{recording.path} is incomplete: {failed}")
            return 2
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
