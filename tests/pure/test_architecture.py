"""Rules of the source code: imports between layers, lengths of files and functions, and constructs
that are not used.

A rule is a function from one source file to its violations. Each rule runs over the whole package,
and over snippets that break it, so that no rule can stop working unnoticed. For tests and examples
only the length of files is limited.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "tileweave"
OTHER_FOLDERS = ("tests", "examples")  # their files are short, too

# Lowest first. A module imports from lower layers and from its own package; facts also import each
# other. `__init__` is the public interface of the package: layers above it may write `import
# tileweave`.
LAYERS = (
    ("errors", "files", "planning"),
    ("transport", "device", "sim"),
    ("kernels",),
    ("ops",),
    ("nn", "profile", "launcher"),
    ("parallel",),
    ("__init__",),
    ("integrations",),
    ("bench",),
    ("tune",),
    ("explore",),
    ("commands",),
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
FACTS = LAYERS[0]
EXEMPT = ("__init__", "__main__")
PROTOCOL = "tileweave.transport.protocol"  # only integers, which every layer may read
# a kernel gets pointers; it does not know where memory comes from
FORBIDDEN = {("kernels", "transport")}
DEVICE_FREE = (*FACTS, "sim", "transport.interface", "transport.protocol")
MAY_PRINT = ("commands", "bench")

MAX_FILE_LINES = 650
MAX_FUNCTION_LINES = 160
MAX_PARAMETERS = 25
HIDDEN = ("values", "type")  # attributes of Triton's tuples
MEANINGLESS = re.compile(r"^_*fast_|(^|_)v\d+$|(^|_)(utils?|helpers?|misc)(_|$)")

FunctionNode = (ast.FunctionDef, ast.AsyncFunctionDef)
Violation = tuple[int, str]


@dataclass(frozen=True)
class Source:
    """One file. `module` is its dotted path in its folder, `ops.__init__` for the file of a
    package."""

    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @property
    def package(self) -> str:
        return self.module.split(".")[0]

    def is_in(self, places: tuple[str, ...]) -> bool:
        return any(self.module == place or self.module.startswith(f"{place}.") for place in places)


Rule = Callable[[Source], Iterator[Violation]]


@cache
def sources(folder: Path) -> tuple[Source, ...]:
    """Every Python file in `folder`, read and parsed once for all rules."""
    return tuple(
        Source(".".join(path.relative_to(folder).with_suffix("").parts), path.read_text("utf-8"))
        for path in sorted(folder.rglob("*.py"))
    )


@pytest.fixture(scope="module", autouse=True)
def drop_sources() -> Iterator[None]:
    """Syntax trees are many objects, which garbage collection in later tests would scan."""
    yield
    sources.cache_clear()


def violations(rule: Rule, folder: Path) -> list[str]:
    """The violations of every Python file in `folder`, as locations that an editor can open."""
    return [
        f"{folder / source.module.replace('.', '/')}.py:{line}: {what}"
        for source in sources(folder)
        for line, what in rule(source)
    ]


# --- Reading a tree ---


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def executed(node: ast.AST, *, inside_functions: bool = True) -> Iterator[ast.AST]:
    """Every node that runs, without those under `if TYPE_CHECKING:`. Bodies of functions are
    optional."""
    yield node
    if isinstance(node, FunctionNode) and not inside_functions:
        return
    children = (
        node.orelse
        if isinstance(node, ast.If) and is_type_checking(node)
        else ast.iter_child_nodes(node)
    )
    for child in children:
        yield from executed(child, inside_functions=inside_functions)


def imported(source: Source, *, inside_functions: bool = True) -> Iterator[tuple[int, str]]:
    """The line and the absolute dotted name of everything `source` imports when it runs."""
    for node in executed(source.tree, inside_functions=inside_functions):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            here = ["tileweave", *source.module.split(".")]
            base = [
                *(here[: -node.level] if node.level else []),
                *(node.module.split(".") if node.module else []),
            ]
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def internal_imports(source: Source) -> Iterator[tuple[int, str]]:
    """The line and the top-level package of everything `source` imports from tileweave."""
    for line, name in imported(source):
        top, _, rest = name.partition(".")
        if top == "tileweave" and not f"{name}.".startswith(f"{PROTOCOL}."):
            package = rest.split(".")[0]
            is_public_name = "." not in rest and package not in LEVEL
            yield line, "__init__" if is_public_name else package


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in source.nodes if isinstance(node, FunctionNode))


# --- The rules ---


def imports_go_down(source: Source) -> Iterator[Violation]:
    here = source.package
    if here in EXEMPT:
        return
    if here not in LEVEL:
        yield 1, f"{here} has no layer: give it one in LAYERS"
        return
    for line, there in internal_imports(source):
        if there not in LEVEL:
            yield line, f"{there} has no layer: give it one in LAYERS"
        elif (here, there) in FORBIDDEN:
            yield line, f"{here} must not know {there}"
        elif (
            there != here and not (here in FACTS and there in FACTS) and LEVEL[there] >= LEVEL[here]
        ):
            yield line, f"{here} must not import {there}: only lower layers"


def facts_are_device_free(source: Source) -> Iterator[Violation]:
    if source.is_in(DEVICE_FREE):
        for line, name in imported(source, inside_functions=False):
            if name.split(".")[0] in ("torch", "triton"):
                yield line, f"{source.module} must not import {name} when it is imported"


def files_are_short(source: Source) -> Iterator[Violation]:
    length = len(source.text.splitlines())
    if length > MAX_FILE_LINES:
        yield length, f"{length} lines, at most {MAX_FILE_LINES}"


def functions_are_short(source: Source) -> Iterator[Violation]:
    for node in functions(source):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield node.lineno, f"{node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def lists_are_short(source: Source) -> Iterator[Violation]:
    for node in functions(source):
        found = node.args
        parameters = [*found.posonlyargs, *found.args, *found.kwonlyargs]
        count = len(parameters) + sum(one is not None for one in (found.vararg, found.kwarg))
        if count > MAX_PARAMETERS:
            yield node.lineno, f"{node.name} has {count} parameters, at most {MAX_PARAMETERS}"


def fields_are_free_in_triton(source: Source) -> Iterator[Violation]:
    """Triton's own tuples have attributes of these names, which hide a field (Triton 3.6)."""
    if source.is_in(("kernels", "device")):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).endswith("NamedTuple") for base in node.bases
            ):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) in HIDDEN:
                        yield field.lineno, f"{node.name}.{ast.unparse(field.target)}: another name"


def only_commands_print(source: Source) -> Iterator[Violation]:
    if not source.is_in(MAY_PRINT):
        for node in source.nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "print"
            ):
                yield node.lineno, "print(): log, return or raise instead"


def asserts_say_why(source: Source) -> Iterator[Violation]:
    for node in source.nodes:
        if isinstance(node, ast.Assert) and node.msg is None:
            yield node.lineno, f"assert without a message: {ast.unparse(node.test)}"


def excepts_are_narrow(source: Source) -> Iterator[Violation]:
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            for kind in caught:
                if kind is None or ast.unparse(kind).split(".")[-1] in (
                    "Exception",
                    "BaseException",
                ):
                    yield (
                        node.lineno,
                        f"except {ast.unparse(kind) if kind else ''}: name what can happen",
                    )


def imports_are_named(source: Source) -> Iterator[Violation]:
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield node.lineno, f"from {node.module} import *"


def nothing_is_global(source: Source) -> Iterator[Violation]:
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield (
                node.lineno,
                f"global {', '.join(node.names)}: state between calls lives in Workspace",
            )


def names_mean_something(source: Source) -> Iterator[Violation]:
    for part in source.module.split("."):
        if MEANINGLESS.search(part):
            yield 1, f"module {part}: name what it is about"
    for node in source.nodes:
        if isinstance(node, (*FunctionNode, ast.ClassDef)) and MEANINGLESS.search(
            node.name.lower()
        ):
            yield node.lineno, f"{node.name}: name what it is about"


def only_device_has_assembly(source: Source) -> Iterator[Violation]:
    if not source.is_in(("device",)):
        for node in source.nodes:
            if isinstance(
                node, (ast.Attribute, ast.Name, ast.alias)
            ) and "inline_asm" in ast.unparse(node):
                yield node.lineno, "inline assembly belongs in tileweave.device"


RULES: tuple[Rule, ...] = (
    imports_go_down,
    facts_are_device_free,
    files_are_short,
    functions_are_short,
    lists_are_short,
    fields_are_free_in_triton,
    only_commands_print,
    asserts_say_why,
    excepts_are_narrow,
    imports_are_named,
    nothing_is_global,
    names_mean_something,
    only_device_has_assembly,
)


def test_every_layer_is_there() -> None:
    assert set(LEVEL) == {source.package for source in sources(PACKAGE)} - {"__main__"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule: Rule) -> None:
    found = violations(rule, PACKAGE)
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("folder", OTHER_FOLDERS)
def test_files_of_tests_and_examples_are_short(folder: str) -> None:
    assert sources(ROOT / folder), "there is something to look at"
    found = violations(files_are_short, ROOT / folder)
    assert not found, "\n".join(["", *found])


# --- Each rule finds violations, and accepts sound code ---

LIST = ", ".join(f"a{number}" for number in range(MAX_PARAMETERS))  # as long as allowed
BROKEN: tuple[tuple[Rule, str, str], ...] = (
    (imports_go_down, "transport.cuda", "from tileweave.device import signal"),
    (imports_go_down, "device.signal", "import tileweave.transport.interface"),
    (imports_go_down, "device.signal", "from tileweave.transport import protocols"),
    (imports_go_down, "kernels.matmul_all_reduce", "from tileweave import transport"),
    (imports_go_down, "kernels.matmul_all_reduce", "from ..ops import registry"),
    (imports_go_down, "kernels.matmul_all_reduce", "from ..bench import cases"),
    (imports_go_down, "errors", "from . import ops"),
    (imports_go_down, "ops.__init__", "from ..nn import linear"),
    (imports_go_down, "ops.registry", "def late():\n    from tileweave.bench import cases"),
    (
        imports_go_down,
        "ops.registry",
        "if TYPE_CHECKING:\n    import torch\nelse:\n    import tileweave.commands.app",
    ),
    (imports_go_down, "ops.registry", "from tileweave import OPERATORS"),
    (imports_go_down, "nn.linear", "from tileweave.profile import timer"),
    (imports_go_down, "bench.run", "from tileweave.shortcut import cases"),
    (imports_go_down, "shortcut", ""),
    (facts_are_device_free, "planning.schedules.gather", "import torch"),
    (facts_are_device_free, "sim.model", "from triton import language"),
    (
        facts_are_device_free,
        "transport.interface",
        "try:\n    from torch import Tensor\nexcept ImportError:\n    pass",
    ),
    (facts_are_device_free, "planning.matmul", "class Config:\n    import torch.cuda"),
    (files_are_short, "ops.registry", "\n" * (MAX_FILE_LINES + 1)),
    (functions_are_short, "ops.registry", "def long():\n" + "    pass\n" * MAX_FUNCTION_LINES),
    (
        fields_are_free_in_triton,
        "kernels.sums",
        "class Target(NamedTuple):\n    base: Any\n    values: Any",
    ),
    (lists_are_short, "kernels.matmul_all_reduce", f"def long({LIST}, one_more): ..."),
    (lists_are_short, "ops.registry", f"def long({LIST}, *rest): ..."),
    (lists_are_short, "ops.registry", f"def long({LIST}, **options): ..."),
    (lists_are_short, "ops.registry", f"def long({LIST}, /, *, by_name): ..."),
    (lists_are_short, "nn.linear", f"class A:\n    async def long(self, {LIST}): ..."),
    (lists_are_short, "nn.linear", f"def outer():\n    def inner({LIST}, x=1): ..."),
    (only_commands_print, "ops.registry", "def f():\n    print(1)"),
    (only_commands_print, "commandments", "print(1)"),
    (asserts_say_why, "ops.registry", "assert x"),
    (excepts_are_narrow, "ops.registry", "try:\n    f()\nexcept:\n    pass"),
    (excepts_are_narrow, "ops.registry", "try:\n    f()\nexcept Exception as error:\n    pass"),
    (
        excepts_are_narrow,
        "ops.registry",
        "try:\n    f()\nexcept (OSError, builtins.BaseException):\n    pass",
    ),
    (imports_are_named, "ops.registry", "from math import *"),
    (nothing_is_global, "ops.registry", "def f():\n    global cache"),
    (names_mean_something, "ops.utils", ""),
    (names_mean_something, "ops.matmul_v2", ""),
    (names_mean_something, "ops.registry", "def fast_matmul(): ..."),
    (names_mean_something, "ops.registry", "def _matmul_v3(): ..."),
    (names_mean_something, "ops.registry", "def shape_helper(): ..."),
    (names_mean_something, "ops.registry", "class Misc: ..."),
    (
        only_device_has_assembly,
        "kernels.matmul_all_reduce",
        "x = tl.inline_asm_elementwise('', '', [])",
    ),
    (
        only_device_has_assembly,
        "kernels.matmul_all_reduce",
        "from triton.language import inline_asm_elementwise as asm",
    ),
)

SOUND = {
    "planning.matmul": "from tileweave.errors import InputError\ndef f():\n    import torch",
    "transport.interface": (
        "import typing\nif typing.TYPE_CHECKING:\n    import torch\n    from ..ops import registry"
    ),
    "kernels.signal": (
        "from tileweave.transport import protocol\nfrom tileweave.transport.protocol import EPOCH"
    ),
    "device.signal": "from . import remote\ntl.inline_asm_elementwise('', '', [])",
    "kernels.matmul_all_reduce": (
        "import torch\nfrom ..device import signal\nassert x, 'why'\ntl.device_print(x)"
    ),
    "ops.registry": (
        "from tileweave import kernels, transport\ntry:\n    f()\nexcept (OSError, ValueError):\n"
        "    raise"
    ),
    "ops.spec": f"def long({LIST}): ...\nlong({LIST}, {LIST})",
    "bench.run": "import tileweave as tw\nfrom tileweave import OPERATORS, ops\nprint(tw)",
    "commands.app": (
        "from tileweave import __version__, bench\ndef breakfast(): ...\ndef init_conv2d(): ..."
    ),
    "__init__": "from tileweave.commands.app import main",
}


@pytest.mark.parametrize(
    ("rule", "module", "text"),
    BROKEN,
    ids=[f"{rule.__name__}-{place}" for rule, place, _ in BROKEN],
)
def test_rule_finds_violation(rule: Rule, module: str, text: str) -> None:
    assert list(rule(Source(module, text)))


def test_a_long_file_is_found_in_any_folder(tmp_path: Path) -> None:
    for lines in (MAX_FILE_LINES, MAX_FILE_LINES + 1):
        planted = tmp_path / "tests" / "cpu" / f"test_{lines}.py"
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.write_text("\n" * lines)
    assert violations(files_are_short, tmp_path) == [
        f"{planted}:{lines}: {lines} lines, at most {MAX_FILE_LINES}"
    ]


def test_every_rule_is_proven() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(RULES)


@pytest.mark.parametrize("module", SOUND)
def test_rules_accept_sound_code(module: str) -> None:
    assert not [violation for rule in RULES for violation in rule(Source(module, SOUND[module]))]


def test_every_kernel_prepares_the_interpreter() -> None:
    """``device/triton/signal.py`` does so when it is imported. A kernel that runs before is slow,
    and with Triton 3.6 and a recent NumPy it fails."""
    read = {
        source.module: {
            name.removeprefix("tileweave.")
            for _, full in imported(source, inside_functions=False)
            for name in (full, full.rpartition(".")[0])
        }
        for source in sources(PACKAGE)
    }

    def reached(module: str) -> set[str]:
        found, left = {module}, [module]
        while left:
            for name in read.get(left.pop(), set()) - found:
                found.add(name)
                left.append(name)
        return found

    kernels = [one.module for one in sources(PACKAGE / "kernels") if ".jit\ndef " in one.text]
    assert len(kernels) > 20
    late = [one for one in kernels if "device.triton.signal" not in reached(f"kernels.{one}")]
    assert not late, late


# --- Importing the package ---

IMPORT = """
import sys, torch
before = set(sys.modules)
import tileweave
assert "triton" not in set(sys.modules) - before, "importing tileweave imports triton"
assert not torch.cuda.is_initialized(), "importing tileweave initialises CUDA"
"""


def test_importing_the_package_touches_no_device() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SRC)}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
