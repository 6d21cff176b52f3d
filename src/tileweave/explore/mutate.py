"""``tileweave mutate``: each mutant of the kernels runs in exploration until it is found.

The process that does it has run every scenario and knows which statements each run reaches. It
forks for every mutant; the child puts the changed code into the function, where it is, and explores
the scenarios that reach its statement, then those with absent ranks (``absent``). So nothing is
imported or rewritten again.

A mutant is *found* if a run fails, or does not end. One that survives is *explained* by an entry of
``harmless.json``, which says why it is no fault; otherwise it is a *survivor*, also if nothing
reaches it.
"""

from __future__ import annotations

import ast
import copy
import gc
import json
import os
import random
import re
import select
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple, get_type_hints

from tileweave.bench.console import Steps
from tileweave.errors import require
from tileweave.explore import mutants as trees
from tileweave.explore.fuzz import COSTS, STRATEGIES, pool
from tileweave.explore.mutants import SOURCE, Mutant, Place
from tileweave.files import is_there, parse_json, read_text, short, writing

RUNS = 64  # interleavings of one mutant at most
# CPU time of one mutant at most, of interleavings, and again of cases with absent ranks
SECONDS = 3.0
LONGEST = 3.0  # CPU time of one run: without a fault none takes a second
MOST_STEPS = 30_000  # of one interleaving; without a fault none has a third of it
PUT_IN = b"put in "
# runs of each scenario that show what it reaches: (world, strategy, number)
SHOWN = ((2, "walk", 1), (3, "pct", 0), (2, "malice", 3), (4, "walk", 2))
FEW = 100  # mutants that few runs judge first, since preparing all takes longer than judging
HOWS = ("reading", "paused", "named", "moments", "everywhere")  # kinds of absence, cheapest first
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
    def unexplained(self) -> int:
        return self.count("survived") + self.count("unreached")

    @property
    def share(self) -> float:
        """Found, of those that are not explained as harmless."""
        found = self.count("found")
        return found / max(found + self.unexplained, 1)

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


@dataclass(frozen=True)
class _Work:
    """Mutants to judge, each for ``seconds`` of CPU time, by so many children at a time; none
    begins after ``until``, a time of the monotonic clock. ``quick``: few runs show what is reached,
    and none with absent ranks."""

    chosen: list[Mutant]
    workers: int
    seconds: float
    until: float | None
    quick: bool = False


class Prepared:
    """What children share: functions by their place, and which runs reach which statements.

    Forks make the runs that show what is reached, after the first of each scenario.
    """

    def __init__(self, enter: Callable[[Any], None], work: _Work) -> None:
        from tileweave.explore import search, tasks

        self.enter, self.search = enter, search
        self.names = sorted(search.by_name(), key=lambda name: COSTS.get(name, 1.0))
        for file in trees.files():
            import_module(f"tileweave.{file.removesuffix('.py').replace('/', '.')}")
        self.functions = Functions()
        statements = _Statements(self.functions.found, {mutant.place for mutant in work.chosen})
        # statement -> seeds of runs that reach it, and cases with absent ranks that do
        self.runs: dict[tuple[Place, int], list[Any]] = defaultdict(list)
        self.cases: dict[tuple[Place, int], list[int]] = defaultdict(list)
        self.absent: list[Any] = []
        took: dict[Any, float] = {}

        def show(seed: Any) -> tuple[list[int], float]:
            self.functions.clear_caches()  # what they have is not made again
            began = time.process_time()
            reached = statements.numbers(lambda: search.run(seed, enter))
            return sorted(reached), time.process_time() - began

        shown = [
            [search.Seed(name, world, strategy, number) for name in self.names]
            for world, strategy, number in (SHOWN[:1] if work.quick else SHOWN)
        ]
        # the first run of each scenario here, since it makes what all others share
        more = [seed for seeds in shown[1:] for seed in seeds]
        results = [show(seed) for seed in shown[0]] + _in_forks(more, lambda: show, work.workers)
        for seed, (reached, seconds) in zip([*shown[0], *more], results, strict=True):
            took[seed] = seconds
            for statement in reached:
                self.runs[statements.names[statement]].append(seed)
        by_name = search.by_name()
        for seeds in self.runs.values():  # those of these kernels alone first, and cheap ones
            seeds.sort(key=lambda s: (getattr(by_name[s.scenario], "sends", True), took[s]))
        if not work.quick:
            self._show_absence(statements, work.workers)
        statements.restore()
        tasks.MAX_STEPS = MOST_STEPS
        gc.collect()
        gc.freeze()

    def _show_absence(self, statements: _Statements, workers: int) -> None:
        """Fill ``cases``, in forks: it replaces waits."""
        from tileweave.explore.absent import Absence, cases

        for how in HOWS:
            all_cases = list(cases(how, every=True))
            most = {case.scenario: case.programs for case in all_cases}  # the last ones
            self.absent += [c for c in all_cases if c.seed == 0 and c.programs == most[c.scenario]]

        def begin() -> Callable[[Any], list[int]]:
            absence = Absence(self.enter)
            return lambda case: sorted(statements.numbers(lambda: absence.found(case)))

        for number, reached in enumerate(_in_forks(self.absent, begin, workers)):
            for statement in reached:
                self.cases[statements.names[statement]].append(number)

    def reach(self, mutant: Mutant) -> tuple[list[Any], list[Any]]:
        """(seeds, cases with absent ranks) that reach the statement of ``mutant``."""
        at = mutant.place, trees.statement_of(mutant)
        by_how = [
            [case for number in self.cases[at] if (case := self.absent[number]).how == how]
            for how in HOWS
        ]
        turns = zip_longest(*by_how)  # each kind in turn
        return self.runs[at], [case for turn in turns for case in turn if case is not None]

    def explore(self, seeds: list[Any], cases: list[Any], seconds: float) -> tuple[str, int]:
        """In a child, with its mutant: (what finds it or "", runs)."""
        began, tried = time.process_time(), 0
        for seed in _many(seeds, self.search.Seed):
            if tried >= RUNS or time.process_time() - began > seconds:
                break
            tried += 1
            _must_end()
            found = self.search.run(seed, self.enter).failure
            if found is not None:
                return f"{found.kind}: {found.text} ({seed})", tried
        if not cases:
            return "", tried
        from tileweave.explore.absent import Absence

        absence, began = Absence(self.enter), time.process_time()
        for case in cases:
            if time.process_time() - began > seconds:
                break
            tried += 1
            _must_end()
            try:
                wrong = absence.found(case)
            except (self.search.Violation, *self.search.RAISED) as error:
                wrong = [f"{type(error).__name__}: {error} ({case})"]
            if wrong:
                return wrong[0], tried
        return "", tried


def _many(seeds: list[Any], make: Callable[..., Any]) -> Iterator[Any]:
    """``seeds``, then others of the same scenarios: all strategies and worlds."""
    yield from seeds
    names = list(dict.fromkeys(seed.scenario for seed in seeds))
    for number in range(RUNS):
        for world, strategy in zip((2, 3, 4, 2), STRATEGIES, strict=True):
            for name in names:
                seed = make(name, world, strategy, number)
                if seed not in seeds:
                    yield seed


class Functions:
    """The functions of imported modules, whose code can be changed where they are."""

    def __init__(self) -> None:
        self.found = _functions()
        self._caches = _caches()

    def put_in(self, file: str, name: str, node: ast.FunctionDef) -> None:
        """Change the code of a function to that of ``node``, for all that hold it. Children of
        this process do so: nothing is imported or rewritten again."""
        for function, jit in self.found[file, name]:
            function.__code__ = _compiled(copy.deepcopy(node), file, function, jit)
        self.clear_caches()

    def clear_caches(self) -> None:
        for cache in self._caches:
            cache.cache_clear()


class _Statements:
    """Puts a note in front of each statement of the functions at ``places``, until
    :meth:`restore`."""

    def __init__(
        self,
        functions: dict[tuple[str, str], list[tuple[FunctionType, bool]]],
        places: set[Place],
    ) -> None:
        self.names: list[tuple[Place, int]] = []
        self._seen: set[int] = set()
        self._before: list[tuple[FunctionType, CodeType]] = []
        for place in sorted(places, key=lambda p: (p.file, p.line)):
            node = next(node for one, node in trees.functions(place.file) if one == place)
            indices = trees.statements(node)
            first = len(self.names)
            self.names += [(place, index) for index in indices]
            numbers = {index: first + i for i, index in enumerate(indices)}
            for function, jit in functions[place.file, place.name]:
                self._before.append((function, function.__code__))
                noted = trees.noted(node, numbers, NOTE)
                function.__code__ = _compiled(noted, place.file, function, jit)
                function.__globals__[NOTE] = self._seen.add

    def numbers(self, run: Callable[[], object]) -> set[int]:
        self._seen.clear()
        run()
        return set(self._seen)

    def restore(self) -> None:
        for function, code in self._before:
            function.__code__ = code
            function.__globals__.pop(NOTE, None)


NOTE = "_tileweave_reached"


def _compiled(node: ast.FunctionDef, file: str, function: FunctionType, jit: bool) -> CodeType:
    """The code of ``node``, a changed copy of ``function``."""
    from triton.runtime import interpreter as triton_interpreter

    node.decorator_list = []
    node.returns = None
    body: list[ast.stmt] = [node]
    free = function.__code__.co_freevars  # such as the class that super() needs
    if free:
        around = ast.parse(f"def around():\n {' = '.join(free)} = None\n return {node.name}")
        outer: Any = around.body[0]
        outer.body.insert(1, node)
        body = around.body
    whole: Any = ast.Module(body, [])
    if jit:
        whole = triton_interpreter.FunctionRewriter.ast_transformer.visit(whole)
    ast.fix_missing_locations(whole)
    names: dict[str, Any] = {}
    code = compile(whole, str(SOURCE / file), "exec")
    exec(code, function.__globals__, names)
    return (names["around"]() if free else names[node.name]).__code__


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


def _must_end() -> None:
    """Ends this process in a while: a mutant may loop for ever without a scheduling point."""
    signal.setitimer(signal.ITIMER_PROF, LONGEST)


def _child(prepared: Prepared, mutant: Mutant, seconds: float, into: int) -> None:
    began = time.process_time()
    place = mutant.place
    prepared.functions.put_in(place.file, place.name, trees.mutated(mutant))
    os.write(into, PUT_IN)  # from here on, an end of this process is one of the mutant
    how, tried = prepared.explore(*prepared.reach(mutant), seconds)
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


def _in_forks(
    items: list[Any], begin: Callable[[], Callable[[Any], Any]], workers: int
) -> list[Any]:
    """``begin()(item)`` of each item, as JSON has it, in the order of items. ``workers`` forks
    share them; each calls ``begin`` once."""

    def share(first: int) -> Callable[[int], None]:
        def work(into: int) -> None:
            one = begin()
            found = [one(item) for item in items[first::workers]]
            with os.fdopen(into, "w") as pipe:
                json.dump(found, pipe)

        return work

    results: list[Any] = [None] * len(items)
    forks = [_forked(share(first)) for first in range(min(workers, len(items)))]
    for first, (child, out) in enumerate(forks):
        with os.fdopen(out) as pipe:
            text = pipe.read()
        status = os.waitpid(child, 0)[1]
        if status:
            raise RuntimeError(f"a process that shows what runs reach ends with status {status}")
        results[first::workers] = json.loads(text)
    return results


def _judge(work: _Work) -> Generator[Judged, None, None]:
    """In a process whose kernels are interpreted: run all mutants of ``work``. No child is left
    when this ends, however it ends."""
    import torch

    from tileweave.explore.interpreter import exploring

    torch.set_num_threads(1)
    known, workers = explanations(), work.workers
    seconds, until = work.seconds, work.until
    with exploring() as enter:
        prepared = Prepared(enter, work)
        waiting = list(reversed(work.chosen))
        running: dict[int, tuple[int, Mutant, list[bytes]]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    if until is not None and time.monotonic() > until:
                        waiting.clear()
                        break
                    mutant = waiting.pop()
                    if not any(prepared.reach(mutant)):
                        yield _outcome(mutant, "unreached", "", 0, 0.0, known)
                        continue
                    child, out = _forked(lambda into, m=mutant: _child(prepared, m, seconds, into))
                    running[out] = (child, mutant, [])
                for out in select.select(list(running), [], [])[0] if running else ():
                    child, mutant, parts = running[out]
                    parts.append(os.read(out, 65536))
                    if parts[-1]:
                        continue
                    os.close(out)
                    status = os.waitpid(child, 0)[1]
                    del running[out]
                    yield _ended(mutant, b"".join(parts), status, known)
        finally:
            for child, _, _ in running.values():
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _ended(
    mutant: Mutant, text: bytes, status: int, known: list[tuple[re.Pattern[str], str]]
) -> Judged:
    """The result of a child, which has written ``text`` and ended with ``status``."""
    if not text.startswith(PUT_IN):
        return _outcome(mutant, "survived", "cannot be put in", 0, 0.0, known)
    text = text.removeprefix(PUT_IN)
    if text:
        how, tried, spent = json.loads(text)
        return _outcome(mutant, "found" if how else "survived", how, tried, spent, known)
    ended = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    how = "does not end" if ended else f"the process ends with status {status}"
    return _outcome(mutant, "found", how, 0, LONGEST, known)


def _outcome(
    mutant: Mutant,
    outcome: str,
    how: str,
    tried: int,
    seconds: float,
    known: list[tuple[re.Pattern[str], str]],
) -> Judged:
    judged = Judged(mutant.key, mutant.kind, mutant.line, outcome, how, tried, round(seconds, 2))
    return _explained(judged, known)


def _explained(judged: Judged, known: list[tuple[re.Pattern[str], str]]) -> Judged:
    """``judged`` by the explanations that there are."""
    if judged.outcome in ("survived", "unreached") and (why := explained(judged.key, known)):
        return judged._replace(outcome="explained", how=why)
    return judged


def _logged(log: Path | None) -> list[Judged]:
    if log is None or not is_there(log):
        return []
    allowed, remedy = "a file that this command wrote, or none", "pass another name"
    found = []
    for number, line in enumerate(read_text(log, "--log", allowed, remedy).splitlines(), 1):
        where = f"--log {short(log)}, line {number}"
        fields = parse_json(line, where, allowed, remedy)
        require(_is_judged(fields), f"{where}: {short(line)}", allowed, remedy)
        found.append(Judged(**fields))
    return found


def _is_judged(fields: Any) -> bool:
    """Whether ``fields`` are those of :class:`Judged`, with their types."""
    kinds = get_type_hints(Judged)
    return (
        isinstance(fields, dict)
        and fields.keys() == kinds.keys()
        and all(
            type(fields[name]) in ((int, float) if kind is float else (kind,))
            for name, kind in kinds.items()
        )
        and fields["outcome"] in ("found", "explained", "survived", "unreached")
    )


def _named(there: list[Mutant], names: Path) -> list[Mutant]:
    """The mutants whose keys are lines of a file."""
    remedy = "write it from the results of --json or --log"
    wanted = set(read_text(names, "--names", "a file of names, one a line", remedy).splitlines())
    chosen = [mutant for mutant in there if mutant.key in wanted]
    unknown = sorted(wanted - {mutant.key for mutant in chosen})
    require(
        not unknown,
        f"--names {names}, with {short(', '.join(map(repr, unknown[:3])))}",
        "names of mutants, one a line",
        "take them from the results of --json or --log",
    )
    return chosen


def _send(work: _Work, to: Any) -> None:
    """The process of :func:`_judged`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it ends its children
    with closing(_judge(work)) as found:
        for judged in found:
            to.send(judged)
    to.send(None)


def _judged(work: _Work) -> Generator[Judged, None, None]:
    """The results of a process of its own."""
    receive, send = get_context("spawn").Pipe(duplex=False)
    process = get_context("spawn").Process(target=_send, args=(work, send), daemon=False)
    process.start()
    send.close()
    try:
        while (judged := _received(receive)) is not None:
            yield judged
    finally:
        process.terminate()
        process.join()


def _judged_by_all(work: _Work) -> Generator[Judged, None, None]:
    """As :func:`_judged`; few mutants by few runs first, and those that these do not find by all
    runs."""
    left = {mutant.key: mutant for mutant in work.chosen}
    if len(left) <= FEW:
        for judged in _judged(replace(work, quick=True)):
            if judged.outcome in ("found", "explained"):
                del left[judged.key]
                yield judged
    if left:
        yield from _judged(replace(work, chosen=list(left.values())))


def mutate(
    sample: int = 0,
    pattern: str = "",
    seed: int = 0,
    workers: int = 1,
    seconds: float = SECONDS,
    most: float = 0.0,
    show: bool = True,
    log: Path | None = None,
    names: Path | None = None,
) -> Report:
    """Run ``sample`` mutants (0: all) whose keys contain ``pattern``, drawn with ``seed``, each for
    at most ``seconds`` of CPU time, and begin none after ``most`` seconds (0: no limit).

    log : a file to which each result is added, as a line of JSON. Mutants that it has are not run
        again.
    names : a file whose lines are the keys of mutants: no others are run. A line that is none is an
        :class:`InputError`.
    """
    there = all_mutants(pattern)
    require(
        bool(there),
        f"mutants whose name contains {pattern!r}",
        "a part of FILE:FUNCTION: CHANGE",
        "look for names in the results of --json",
    )
    chosen = list(there) if names is None else _named(there, names)
    random.Random(seed).shuffle(chosen)
    chosen = chosen[: sample or len(chosen)]
    report, began = Report(len(there), seed), time.monotonic()
    wanted, known = {mutant.key for mutant in chosen}, explanations()
    for one in _logged(log):
        if one.key in wanted:
            report.judged.append(_explained(one, known))
            wanted.remove(one.key)
    chosen = [mutant for mutant in chosen if mutant.key in wanted]
    if not chosen:
        return report
    before = len(report.judged)
    every = max(len(chosen) // 40, 1)
    with pool(1), Steps("mutate", -(-len(chosen) // every), show) as steps:  # for its environment
        work = _Work(chosen, workers, seconds, began + most if most else None)
        with closing(_judged_by_all(work)) as found:
            for judged in found:
                report.judged.append(judged)
                if log is not None:
                    with writing(log), log.open("a") as lines:
                        lines.write(json.dumps(judged._asdict()) + "\n")
                spent, done = time.monotonic() - began, len(report.judged) - before
                if done % every == 0 or done == len(chosen):
                    left = spent / done * (len(chosen) - done)
                    steps.now(f"{done} of {len(chosen)} mutants, about {left:.0f} s more")
                    steps.done(
                        f"{report.count('found')} found, {report.count('explained')} explained, "
                        f"{report.count('survived')} survive, {report.count('unreached')} unreached"
                    )
    report.seconds = time.monotonic() - began
    return report


def _received(receive: Any) -> Judged | None:
    try:
        return receive.recv()
    except EOFError:
        raise RuntimeError("the process that runs mutants has ended") from None
