"""Run every mutant in its own process until exploration finds it: ``python -m
tests.explore.find_mutants [name ...]``.

This process forks. A child puts the changed functions in the place of those that this process has
imported. Some mutants change more than functions, or a source that is read: their children are
forked before the package is imported, and import it with one module mutated. Prints one JSON line
per mutant, with ``--story`` also the shrunk trace. Needs TRITON_INTERPRET=1.
"""

from __future__ import annotations

import ast
import compileall
import copy
import gc
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from tests.explore.mutants import MUTANTS as MATMULS
from tests.explore.mutants import Mutant
from tests.explore.mutants_by_tiles import MUTANTS as BY_TILES
from tests.explore.mutants_dispatch import MUTANTS as DISPATCH
from tests.explore.mutants_embedding import MUTANTS as EMBEDDING
from tests.explore.mutants_embedding_over_nodes import MUTANTS as EMBEDDING_OVER_NODES
from tests.explore.mutants_exchange import MUTANTS as EXCHANGES
from tests.explore.mutants_experts import MUTANTS as EXPERTS
from tests.explore.mutants_experts import PARTITIONS
from tests.explore.mutants_experts_over_nodes import MUTANTS as EXPERTS_OVER_NODES
from tests.explore.mutants_gather import MUTANTS as GATHERS
from tests.explore.mutants_nodes import MUTANTS as NODES
from tests.explore.mutants_one_shot import MUTANTS as ONE_SHOT
from tests.explore.mutants_over_nodes import MUTANTS as OVER_NODES
from tests.explore.mutants_scaled import MUTANTS as SCALED
from tests.explore.mutants_time_outs import MUTANTS as TIME_OUTS

MUTANTS = (
    *MATMULS,
    *EMBEDDING,
    *EXPERTS,
    *DISPATCH,
    *EXCHANGES,
    *BY_TILES,
    *ONE_SHOT,
    *GATHERS,
    *NODES,
    *OVER_NODES,
    *EXPERTS_OVER_NODES,
    *EMBEDDING_OVER_NODES,
    *SCALED,
    *TIME_OUTS,
)

SOURCE = Path(__file__).parents[2] / "src" / "tileweave"
RUNS = 400  # most interleavings for one mutant
SECONDS = 100  # of CPU time


class Mutated(MetaPathFinder):
    """Imports the module that ``mutant`` changes from ``path``, and nothing else."""

    def __init__(self, mutant: Mutant, path: Path) -> None:
        self._module, self._path = (
            ".".join(("tileweave", *Path(mutant.file).with_suffix("").parts)),
            path,
        )

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        return spec_from_file_location(fullname, self._path) if fullname == self._module else None


def changed_functions(mutant: Mutant) -> list[tuple[str, ast.FunctionDef]] | None:
    """The functions that ``mutant`` changes, by qualified name; None where it changes anything
    else, or what concurrent partitions are translated from."""
    if mutant.scenarios.startswith(PARTITIONS):
        return None
    text = (SOURCE / mutant.file).read_text("utf-8")
    trees = [ast.parse(text), ast.parse(mutant.apply(text))]
    before, after = (dict(functions_of(tree.body)) for tree in trees)
    found = [
        (name, copy.deepcopy(node))
        for name, node in after.items()
        if name in before and ast.dump(node) != ast.dump(before[name])
    ]
    for node in (*before.values(), *after.values()):
        node.body = []
    return found if ast.dump(trees[0]) == ast.dump(trees[1]) else None


def functions_of(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node


def hunt_imported(mutant: Mutant) -> dict[str, object]:
    """In a child that has not imported the package: import it mutated, and explore."""
    with tempfile.TemporaryDirectory(prefix="tileweave-mutant-") as folder:
        path = Path(folder) / Path(mutant.file).name
        path.write_text(mutant.apply((SOURCE / mutant.file).read_text("utf-8")), "utf-8")
        sys.meta_path.insert(0, Mutated(mutant, path))
        tempfile.tempdir = folder  # leftovers of a child go with it
        from tileweave.explore.interpreter import exploring

        if mutant.scenarios.startswith(PARTITIONS):
            from tests.explore.partitions import register

            register()
        with exploring() as enter:
            return hunt(mutant, enter)


def hunt(mutant: Mutant, enter: Any, runs: int = RUNS) -> dict[str, object]:
    """In a child with its mutant: explore the scenarios of ``mutant``, all strategies in turn,
    until a violation is found."""
    from tileweave.explore import search
    from tileweave.explore.search import Seed, run, shrink, story

    names = [name for name in search.by_name() if f"{name}$".startswith(mutant.scenarios)]
    tried, began = 0, time.process_time()
    for number in range(runs):
        for strategy in ("walk", "pct", "delay", "malice"):
            for name in names:
                tried += 1
                # two nodes of two ranks, which push inside their node
                over_nodes = "nodes" in name.partition("/")[2]
                sizes = (3, 4) if over_nodes else (2, 3)
                found = run(Seed(name, sizes[tried % 2], strategy, number), enter)
                if found.failure is not None and "--story" in sys.argv:
                    print(f"--- {mutant.name}", story(shrink(found, enter)), sep="\n", flush=True)
                if found.failure is not None:
                    return {
                        "mutant": mutant.name,
                        "found": True,
                        "kind": found.failure.kind,
                        "text": found.failure.text,
                        "seed": str(found.seed),
                        "tried": tried,
                        "seconds": round(time.process_time() - began, 2),
                    }
                if tried >= runs:
                    return {"mutant": mutant.name, "found": False, "tried": tried}
    return {"mutant": mutant.name, "found": False, "tried": tried}


def _child(mutant: Mutant, look: Callable[[Mutant], dict[str, object]], descriptor: int) -> None:
    # CPU time: beside other load, wall time says nothing
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    with os.fdopen(descriptor, "w") as pipe:
        pipe.write(json.dumps(look(mutant)))


def hunt_all(
    mutants: list[Mutant], look: Callable[[Mutant], dict[str, object]], workers: int = 2
) -> list[dict[str, object]]:
    """Let ``look`` run every mutant in a fork of this process, ``workers`` at a time."""
    waiting, results, running = list(mutants), [], {}
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.pop(0)
            out, into = os.pipe()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.close(out)
                    _child(mutant, look, into)
                    code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            os.close(into)
            running[out] = (child, mutant, [])
        for descriptor in select.select(list(running), [], [])[0]:
            child, mutant, parts = running[descriptor]
            data = os.read(descriptor, 65536)
            parts.append(data)
            if data:
                continue
            os.close(descriptor)
            status = os.waitpid(child, 0)[1]
            del running[descriptor]
            text = b"".join(parts).decode()
            ended = f"ended with status {status}"
            results.append(
                json.loads(text) if text else {"mutant": mutant.name, "found": False, "text": ended}
            )
            print(json.dumps(results[-1]), flush=True)
    return results


def main(wanted: list[str]) -> None:
    import greenlet  # noqa: F401 - children have these from here
    import torch
    import triton.experimental.gluon.language.nvidia.hopper  # noqa: F401

    torch.set_num_threads(1)
    sys.path.insert(0, str(SOURCE.parent))
    chosen = [m for m in MUTANTS if not wanted or any(text in m.name for text in wanted)]
    changed = {mutant.name: changed_functions(mutant) for mutant in chosen}
    imported = [m for m in chosen if not changed[m.name]]
    assert "tileweave" not in sys.modules, "children import their own"
    compileall.compile_dir(SOURCE, quiet=2)  # else each child does
    gc.freeze()
    results = hunt_all(imported, hunt_imported)
    gc.unfreeze()
    from tileweave.explore.interpreter import exploring
    from tileweave.explore.mutate import Functions

    for file in sorted({mutant.file for mutant in chosen}):
        import_module(f"tileweave.{file.removesuffix('.py').replace('/', '.')}")
    with exploring() as enter:
        functions = Functions()
        gc.collect()
        gc.freeze()

        def hunt_in_place(mutant: Mutant) -> dict[str, object]:
            for name, node in changed[mutant.name] or ():
                functions.put_in(mutant.file, name, node)
            return hunt(mutant, enter)

        results += hunt_all([m for m in chosen if m not in imported], hunt_in_place)
    survivors = [r["mutant"] for r in results if not r["found"]]
    print(json.dumps({"mutants": len(results), "survivors": survivors}))


if __name__ == "__main__":
    main([word for word in sys.argv[1:] if not word.startswith("--")])
