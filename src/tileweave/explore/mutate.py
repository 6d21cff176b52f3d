"""``tileweave mutate``: each mutant of the kernels runs in exploration until it is found.

The process that does it has explored every scenario once and knows which functions each of them
reaches. It forks for every mutant; the child puts the changed code into the function, where it is,
and explores the scenarios that reach it. So nothing is imported or rewritten again.

A mutant is *found* if an interleaving fails, or does not end. One that survives is *explained* by
an entry of ``harmless.json``, which says why it is no fault; otherwise it is a *survivor*.
"""

from __future__ import annotations

import ast
import cProfile
import gc
import json
import os
import random
import re
import select
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from tileweave.bench.console import Steps
from tileweave.explore import mutants as trees
from tileweave.explore.fuzz import COSTS, STRATEGIES, pool
from tileweave.explore.mutants import SOURCE, Mutant, Place

RUNS = 64  # interleavings of one mutant at most
SECONDS = 3.0  # CPU time of one mutant at most; the last interleaving may take as long again
MOST_STEPS = 30_000  # of one interleaving; without a fault none has a third of it
PUT_IN = b"put in "
LEAST_SHARE = 0.95  # to be found, of mutants that are reached and not explained
HARMLESS = Path(__file__).with_name("harmless.json")


class Judged(NamedTuple):
    """The outcome of one mutant. ``outcome``: found, explained, survived, or unreached. ``how``:
    the violation and its seed, or the reason."""

    key: str
    kind: str
    line: int
    outcome: str
    how: str = ""
    tried: int = 0
    seconds: float = 0.0


@dataclass
class Report:
    """What mutants came to."""

    mutants: int  # there are
    seed: int
    judged: list[Judged] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, outcome: str) -> int:
        return sum(one.outcome == outcome for one in self.judged)

    @property
    def share(self) -> float:
        """Found, of those that are reached and not explained as harmless."""
        found, survived = self.count("found"), self.count("survived")
        return found / (found + survived) if found + survived else 1.0

    def as_json(self) -> dict[str, object]:
        kinds: dict[str, Counter[str]] = defaultdict(Counter)
        files: dict[str, Counter[str]] = defaultdict(Counter)
        for one in self.judged:
            kinds[one.kind][one.outcome] += 1
            files[one.key.partition(":")[0]][one.outcome] += 1
        return {
            "mutants": self.mutants,
            "judged": len(self.judged),
            **{name: self.count(name) for name in ("found", "explained", "survived", "unreached")},
            "share_found": round(self.share, 4),
            "sample_seed": self.seed,
            "seconds": round(self.seconds, 1),
            "cpu_seconds": round(sum(one.seconds for one in self.judged), 1),
            "kinds": {kind: dict(found) for kind, found in sorted(kinds.items())},
            "files": {file: dict(found) for file, found in sorted(files.items())},
            "results": [one._asdict() for one in self.judged],
        }


def all_mutants(pattern: str = "") -> list[Mutant]:
    return [m for file in trees.files() for m in trees.mutants(file) if pattern in m.key]


def explanations() -> list[tuple[re.Pattern[str], str]]:
    """(pattern of whole keys, why such a mutant is no fault that exploration should find)."""
    entries = json.loads(HARMLESS.read_text("utf-8"))
    return [(re.compile(entry["key"]), entry["why"]) for entry in entries]


def explained(key: str, known: Iterable[tuple[re.Pattern[str], str]]) -> str:
    return next((why for pattern, why in known if pattern.fullmatch(key)), "")


# --- In the process that forks ---


class Prepared:
    """What children share: functions by their place, and the scenarios that reach each."""

    def __init__(self, enter: Callable[[Any], None]) -> None:
        from tileweave.explore import search, tasks

        self.enter, self.search = enter, search
        self.names = sorted(search.by_name(), key=lambda name: COSTS.get(name, 1.0))
        self.reached: dict[tuple[str, str, int], list[str]] = defaultdict(list)
        for name in self.names:
            profile = cProfile.Profile()
            profile.enable()
            search.run(search.Seed(name, 2, "walk", 1), enter)
            profile.disable()
            for entry in profile.getstats():
                if not isinstance(entry.code, str):
                    code = entry.code
                    self.reached[code.co_filename, code.co_name, code.co_firstlineno].append(name)
        tasks.MAX_STEPS = MOST_STEPS
        self.functions = _functions()
        self.caches = _caches()
        gc.collect()
        gc.freeze()

    def scenarios(self, place: Place) -> list[str]:
        path, name = str(SOURCE / place.file), place.name.rpartition(".")[2]
        found = {
            scenario
            for line in range(place.first, place.line + 1)
            for scenario in self.reached.get((path, name, line), ())
        }
        return [name for name in self.names if name in found]

    def explore(self, names: list[str], seconds: float) -> tuple[str, int]:
        """In a child, with its mutant: (the violation that finds it or "", interleavings)."""
        began, tried = time.process_time(), 0
        for number in range(RUNS):
            for strategy in STRATEGIES:
                for name in names:
                    tried += 1
                    world = 3 if tried % 3 == 0 else 2
                    seed = self.search.Seed(name, world, strategy, number)
                    found = self.search.run(seed, self.enter).failure
                    if found is not None:
                        return f"{found.kind}: {found.text} ({seed})", tried
                    if tried >= RUNS or time.process_time() - began > seconds:
                        return "", tried
        return "", tried

    def put_in(self, mutant: Mutant) -> None:
        """Change the code of the function, for all that hold it."""
        found = self.functions[mutant.place.file, mutant.place.name]
        for function, jit in found:
            function.__code__ = _compiled(mutant, function, jit)
        for cache in self.caches:
            cache.cache_clear()


def _compiled(mutant: Mutant, function: FunctionType, jit: bool) -> Any:
    from triton.runtime import interpreter as triton_interpreter

    node = trees.mutated(mutant)
    node.decorator_list = []
    node.returns = None
    whole: Any = ast.Module([node], [])
    if jit:
        whole = triton_interpreter.FunctionRewriter.ast_transformer.visit(whole)
    ast.fix_missing_locations(whole)
    names: dict[str, Any] = {}
    code = compile(whole, str(SOURCE / mutant.place.file), "exec")
    exec(code, function.__globals__, names)
    return names[node.name].__code__


def _functions() -> dict[tuple[str, str], list[tuple[FunctionType, bool]]]:
    """(file, qualified name) -> the functions that run it, and whether Triton interprets it."""
    from triton.runtime.interpreter import InterpretedFunction

    found: dict[tuple[str, str], list[tuple[FunctionType, bool]]] = defaultdict(list)
    root = str(SOURCE) + os.sep
    plain: dict[int, FunctionType] = {}
    kernels: set[int] = set()
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(root):
            plain[id(thing)] = thing
        elif type(thing) is InterpretedFunction:
            fn: Any = thing.fn
            if fn.__code__.co_filename.startswith(root):
                rewritten: Any = thing.rewrite()
                file = Path(fn.__code__.co_filename).relative_to(SOURCE).as_posix()
                found[file, fn.__qualname__].append((rewritten, True))
                kernels |= {id(fn), id(rewritten)}
    for number, function in plain.items():
        if number not in kernels and "<locals>" not in function.__qualname__:
            file = Path(function.__code__.co_filename).relative_to(SOURCE).as_posix()
            found[file, function.__qualname__].append((function, False))
    return found


def _caches() -> list[Any]:
    """Caches that may hold what the function without a fault gave."""
    return [
        thing
        for thing in gc.get_objects()
        if type(thing).__name__ == "_lru_cache_wrapper"
        and str(getattr(thing, "__module__", "")).startswith("tileweave.")
        and not str(thing.__module__).startswith("tileweave.explore.scenarios")
    ]


def _child(prepared: Prepared, mutant: Mutant, names: list[str], seconds: float, into: int) -> None:
    began = time.process_time()
    prepared.put_in(mutant)
    os.write(into, PUT_IN)  # from here on, an end of this process is one of the mutant
    # ends the process: a mutant may loop for ever without a scheduling point
    signal.setitimer(signal.ITIMER_PROF, 2 * seconds + 2)
    how, tried = prepared.explore(names, seconds)
    with os.fdopen(into, "w") as pipe:
        json.dump([how, tried, time.process_time() - began], pipe)


def _forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Run ``work`` in a fork. Returns (its id, where its result comes)."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(out)
            work(into)
            code = 0
        finally:
            os._exit(code)
    os.close(into)
    return child, out


def _judge(chosen: list[Mutant], workers: int, seconds: float) -> Iterator[Judged]:
    """In a process whose kernels are interpreted: run all of ``chosen``."""
    import torch

    from tileweave.explore.interpreter import exploring

    torch.set_num_threads(1)
    known = explanations()
    with exploring() as enter:
        prepared = Prepared(enter)
        waiting = list(reversed(chosen))
        running: dict[int, tuple[int, Mutant, list[bytes]]] = {}
        while waiting or running:
            while waiting and len(running) < workers:
                mutant = waiting.pop()
                names = prepared.scenarios(mutant.place)
                if not names:
                    yield _outcome(mutant, "unreached", "", 0, 0.0, known)
                    continue
                child, out = _forked(
                    lambda into, m=mutant, n=names: _child(prepared, m, n, seconds, into)
                )
                running[out] = (child, mutant, [])
            if not running:
                break
            for out in select.select(list(running), [], [])[0]:
                child, mutant, parts = running[out]
                parts.append(os.read(out, 65536))
                if parts[-1]:
                    continue
                os.close(out)
                del running[out]
                status = os.waitpid(child, 0)[1]
                text = b"".join(parts)
                if not text.startswith(PUT_IN):
                    raise RuntimeError(f"{mutant.key} cannot be put in")
                text = text.removeprefix(PUT_IN)
                if text:
                    how, tried, spent = json.loads(text)
                    yield _outcome(mutant, "found" if how else "survived", how, tried, spent, known)
                else:
                    ended = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
                    how = "does not end" if ended else f"the process ends with status {status}"
                    yield _outcome(mutant, "found", how, 0, 2 * seconds + 2, known)


def _outcome(
    mutant: Mutant,
    outcome: str,
    how: str,
    tried: int,
    seconds: float,
    known: list[tuple[re.Pattern[str], str]],
) -> Judged:
    if outcome in ("survived", "unreached") and (why := explained(mutant.key, known)):
        outcome, how = "explained", why
    return Judged(mutant.key, mutant.kind, mutant.line, outcome, how, tried, round(seconds, 2))


def _send(chosen: list[Mutant], workers: int, seconds: float, to: Any) -> None:
    """The process of :func:`mutate`."""
    for judged in _judge(chosen, workers, seconds):
        to.send(judged)
    to.send(None)


def mutate(
    sample: int = 0,
    pattern: str = "",
    seed: int = 0,
    workers: int = 1,
    seconds: float = SECONDS,
    most: float = 0.0,
    show: bool = True,
) -> Report:
    """Run ``sample`` mutants (0: all) whose keys contain ``pattern``, drawn with ``seed``, each for
    at most ``seconds`` of CPU time, and begin none after ``most`` seconds (0: no limit)."""
    there = all_mutants(pattern)
    chosen = list(there)
    random.Random(seed).shuffle(chosen)
    chosen = chosen[: sample or len(chosen)]
    report, began = Report(len(there), seed), time.monotonic()
    every = max(len(chosen) // 40, 1)
    with pool(1), Steps("mutate", -(-len(chosen) // every), show) as steps:  # for its environment
        receive, send = get_context("spawn").Pipe(duplex=False)
        process = get_context("spawn").Process(
            target=_send, args=(chosen, workers, seconds, send), daemon=False
        )
        process.start()
        send.close()
        try:
            while (judged := _received(receive)) is not None:
                report.judged.append(judged)
                late = most and time.monotonic() - began > most
                if len(report.judged) % every == 0 or len(report.judged) == len(chosen):
                    spent, done = time.monotonic() - began, len(report.judged)
                    left = spent / done * (len(chosen) - done)
                    steps.now(f"{done} of {len(chosen)} mutants, about {left:.0f} s more")
                    steps.done(
                        f"{report.count('found')} found, {report.count('explained')} explained, "
                        f"{report.count('survived')} survive, {report.count('unreached')} unreached"
                    )
                if late:
                    break
        finally:
            process.terminate()
            process.join()
    report.seconds = time.monotonic() - began
    return report


def _received(receive: Any) -> Judged | None:
    try:
        return receive.recv()
    except EOFError:
        raise RuntimeError("the process that runs mutants has ended") from None
