"""Run a scenario under a strategy; replay it, shrink it, and show what happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tileweave.errors import require
from tileweave.explore.memory import Violation
from tileweave.explore.ranks import COMPONENTS, MAX_PROGRAMS, World
from tileweave.explore.results import written_outside
from tileweave.explore.scenarios import PAYLOADS, Drawn, Scenario, same
from tileweave.explore.scenarios import SCENARIOS as MATMULS
from tileweave.explore.scenarios_alone import SCENARIOS as ALONE
from tileweave.explore.scenarios_dispatch import DISPATCH
from tileweave.explore.scenarios_edges import SCENARIOS as EDGES
from tileweave.explore.scenarios_embedding import EMBEDDING
from tileweave.explore.scenarios_exchange import SCENARIOS as EXCHANGES
from tileweave.explore.scenarios_experts import EXPERT_SCENARIOS
from tileweave.explore.scenarios_local import SCENARIOS as LOCAL
from tileweave.explore.scenarios_maps import SCENARIOS as MAPS
from tileweave.explore.scenarios_nodes import SCENARIOS as NODES
from tileweave.explore.scenarios_rail import SCENARIOS as RAIL
from tileweave.explore.scenarios_scaled import SCENARIOS as SCALED
from tileweave.explore.scenarios_words import SCENARIOS as WORDS
from tileweave.explore.scenarios_workspace import SCENARIOS as WORKSPACES
from tileweave.explore.strategies import Delays, Malice, Noting, Priorities, Walk, Written
from tileweave.explore.tasks import Decision, Event

STRATEGIES = ("walk", "pct", "delay", "malice")
DELAYS = 2000  # seeds of one systematic search
MOST_RUNS, LINES = 150, 40  # runs to shrink one failure; steps that its story shows
# the first call, the other parity, the wrap to negative numbers, the wrap to zero
EPOCHS = (1, 2, 2**31 - 2, -1)
RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)
SCENARIOS: tuple[Scenario, ...] = (
    *MATMULS,
    *SCALED,
    *EMBEDDING,
    *EXPERT_SCENARIOS,
    *DISPATCH,
    *EXCHANGES,
    *NODES,
    *LOCAL,
    *MAPS,
    *WORKSPACES,
    *RAIL,
    *WORDS,
    *ALONE,
    *EDGES,
)
Enter = Callable[[World | None], None]


@dataclass(frozen=True)
class Seed:
    """The name of one run, ``scenario@world:strategy:number``. It determines everything about the
    run."""

    scenario: str
    world: int
    strategy: str
    number: int

    def __str__(self) -> str:
        return f"{self.scenario}@{self.world}:{self.strategy}:{self.number}"

    @staticmethod
    def parse(text: str) -> Seed:
        """The seed of a name. Raises :class:`InputError` if there is none of that name."""
        scenario, _, rest = text.rpartition("@")
        world, strategy, number, *more = (*rest.split(":"), "", "")
        remedy = "copy the seed that a failure printed"
        names = by_name()
        require(
            scenario in names,
            f"seed {text!r}, scenario {scenario!r}",
            ", ".join(map(repr, names)),
            remedy,
        )
        require(
            strategy in STRATEGIES,
            f"seed {text!r}, strategy {strategy!r}",
            ", ".join(STRATEGIES),
            remedy,
        )
        whole = world in ("2", "3", "4") and number.isdecimal() and not any(more)
        require(
            whole,
            f"seed {text!r}",
            "scenario@world:strategy:number, of a world of 2, 3 or 4",
            remedy,
        )
        return Seed(scenario, int(world), strategy, int(number))


@dataclass
class Found:
    """The result of a run: its steps, its schedule, and its failure (None: none)."""

    seed: Seed
    steps: int
    # hash of all decisions; runs of a scenario with the same hash are the same interleaving
    schedule: int
    failure: Violation | None
    choices: int = 0  # of a delay-bounded run: steps at which more than one task was ready
    departures: dict[int, Decision] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    describe: Callable[[int, int], str] = lambda low, high: ""


def by_name() -> dict[str, Scenario]:
    """All scenarios, by the names that seeds have."""
    return {f"{s.op}/{s.name}": s for s in SCENARIOS}


def draw(scenario: Scenario, seed: Seed) -> Drawn:
    """What the seed decides besides the schedule. It is the same for all seeds of a systematic
    search."""
    number = seed.number // DELAYS if seed.strategy == "delay" else seed.number
    choice = random.Random(f"{seed.scenario} {seed.world} {number}")
    programs = choice.choice(scenario.programs)
    resident = choice.choice((None, None, 1, 2))
    epoch, calls, order = choice.choice(EPOCHS), choice.choice((3, 3, 4)), choice.randrange(1000)
    payload = choice.choice(getattr(scenario, "payloads", PAYLOADS[:1]))
    multiprocessors = choice.choice((1, 2, 3))
    resident = resident and max(resident, scenario.resident)
    return Drawn(programs, resident, epoch, calls, order, payload, multiprocessors)


def strategy_of(seed: Seed, enter: Enter) -> Walk | Priorities | Delays | Malice:
    if seed.strategy == "walk":
        return Walk(seed.number)
    if seed.strategy == "pct":
        return Priorities(seed.number)
    if seed.strategy == "delay":
        return delays_of(seed, enter)
    return malice_of(seed.number, seed.world)


def delays_of(seed: Seed, enter: Enter) -> Delays:
    """Seed n of a systematic search: stores early or late, each rank first; first without delays,
    then with every single one, then with pairs.

    Neighbouring numbers delay at choices that are far apart, so that a part of the search is spread
    over the whole run.
    """
    number, place = seed.number % DELAYS, seed.number // DELAYS
    eager, first, index = number % 2 == 0, number // 2 % seed.world, number // 2 // seed.world
    if index == 0:
        return Delays(frozenset(), eager, COMPONENTS * first)
    length = _choices(
        Seed(seed.scenario, seed.world, "delay", place * DELAYS + number % (2 * seed.world)), enter
    )
    stride = next(s for s in (89, 97, 101, 103) if length % s)
    if index <= length:
        steps = {1 + index * stride % length}
    else:
        choice = random.Random(f"delays {number}")
        steps = {choice.randint(1, length) for _ in range(choice.choice((2, 2, 3)))}
    return Delays(frozenset(steps), eager, COMPONENTS * first)


_CHOICES: dict[Seed, int] = {}


def _choices(base: Seed, enter: Enter) -> int:
    """How many choices a run without delays has. It is run to count them, unless this process has
    run it."""
    if base not in _CHOICES:
        run(base, enter)
    return max(_CHOICES[base], 1)


def malice_of(number: int, world: int) -> Malice:
    """Each rank late, the stores of each rank late, each copy engine late; and all pairs of
    these."""
    all_tasks = range(world * COMPONENTS)
    # (tasks that are late, writers whose stores are late): a rank, the stores of a rank, its copy
    # engines, its upper programs
    singles = []
    for rank in range(world):
        mine = range(rank * COMPONENTS, (rank + 1) * COMPONENTS)
        singles += [
            (frozenset(mine), frozenset()),
            (frozenset(), frozenset(mine)),
            (frozenset(mine[MAX_PROGRAMS + 1 :]), frozenset()),
            (frozenset(mine[1:MAX_PROGRAMS]), frozenset(all_tasks)),
        ]
    late, stores = singles[number % len(singles)]
    if number >= len(singles):
        other = singles[number // len(singles) % len(singles)]
        late, stores = late | other[0], stores | other[1]
    return Malice(late, stores, turns=(1, 3, 17)[number % 3])


def run(
    seed: Seed, enter: Enter, departures: dict[int, Decision] | None = None, recording: bool = False
) -> Found:
    """Run ``seed``. ``departures`` are replayed instead of the strategy of the seed. With
    ``recording``, what is found has departures and events."""
    scenario = by_name()[seed.scenario]
    drawn = draw(scenario, seed)
    strategy = strategy_of(seed, enter) if departures is None else Written(departures)
    noting = Noting(strategy) if recording else None
    world = World(
        seed.world,
        drawn.programs,
        noting or strategy,
        drawn.resident,
        recording,
        drawn.multiprocessors,
        cell_bytes=4 if drawn.payload == "whole" else 2,
        over_nodes=getattr(scenario, "over_nodes", False),
    )
    enter(world)
    failure = None
    try:
        world.run(lambda rank: _host(world, rank, scenario, drawn))
        _check_ends(world, scenario, drawn)
    except Violation as error:
        failure = error
    except RAISED as error:  # what a kernel raises is a failure, too
        failure = Violation("error", f"{type(error).__name__}: {error}")
    finally:
        enter(None)
        world.close()
    tasks = world.tasks
    schedule = hash((drawn, *tasks.decisions))
    choices = strategy.choices if isinstance(strategy, Delays) else 0
    if isinstance(strategy, Delays) and not strategy.steps:
        _CHOICES[seed] = choices
    return Found(
        seed,
        tasks.step,
        schedule,
        failure,
        choices,
        noting.departures if noting is not None else {},
        tasks.events,
        tasks.describe,
    )


def _host(world: World, rank: int, scenario: Scenario, drawn: Drawn) -> None:
    scenario.begin(world, rank, drawn)
    for number in range(drawn.calls):
        for name, got, want in scenario.call(world, rank, number, drawn):
            world.read(rank, got)
            if written_outside(got):
                raise world.tasks.fail(
                    "wrong result", f"rank {rank}, call {number}: stores next to {name}"
                )
            if not torch.equal(got, want) and not (right := same(got, want)).all():
                rows = (~right).reshape(got.shape[0], -1).any(dim=1).nonzero().flatten().tolist()
                raise world.tasks.fail(
                    "wrong result", f"rank {rank}, call {number}: {name} differs in rows {rows}"
                )


def _check_ends(world: World, scenario: Scenario, drawn: Drawn) -> None:
    for rank in range(world.size):
        for name, seen, expected in scenario.end(world, rank, drawn):
            if seen != expected:
                raise Violation("left over", f"rank {rank}: {name} {seen}, expected {expected}")


def shrink(found: Found, enter: Enter) -> Found:
    """The same failure with fewer departures from the plain schedule: ever smaller parts of them
    are dropped while it fails.

    Returns ``found`` itself, without events, if it does not fail again.
    """
    assert found.failure is not None, "only failures are shrunk"
    again = run(found.seed, enter, recording=True)
    if again.failure is None:
        return found
    best = run(found.seed, enter, again.departures, recording=True)
    kind = again.failure.kind
    if best.failure is None or best.failure.kind != kind:
        return again
    part, runs = max(len(best.departures) // 2, 1), MOST_RUNS
    while runs > 0 and best.departures:
        steps, shorter = sorted(best.departures), None
        for first in range(0, len(steps), part):
            runs -= 1
            dropped = set(steps[first : first + part])
            tried = run(
                found.seed,
                enter,
                {s: d for s, d in best.departures.items() if s not in dropped},
                recording=True,
            )
            same = tried.failure is not None and tried.failure.kind == kind
            if same and len(tried.departures) < len(best.departures):
                shorter = tried
                break
            if runs <= 0:
                break
        if shorter is not None:
            best = shorter
        elif part == 1:
            break
        part = max(min(part, len(best.departures)) // (1 if shorter else 2), 1)
    return best


def story(found: Found) -> str:
    """The failure, how to replay it, and the steps before it."""
    assert found.failure is not None, "only failures have a story"
    about = found.failure
    head = [f"{about.kind}: {about.text}", f"replay: tileweave fuzz --replay '{found.seed}'"]
    if not found.events:
        return "\n".join([*head, "but it did not fail again"])
    shown = [
        e
        for e in found.events
        if e.what != "arrives" or (e.low < about.high and about.low < e.high)
    ]
    if about.high:
        touching = [e for e in shown if e.low < about.high and about.low < e.high]
        involved = {e.task for e in touching[-4:]}
        shown = [e for e in shown if e.task in involved or e in touching]
    text = [
        *head,
        f"shrunk to {len(found.departures)} departures from the plain schedule; "
        f"the last {min(LINES, len(shown))} of {len(shown)} steps:",
    ]
    for event in shown[-LINES:]:
        where = found.describe(event.low, event.high) if event.high else ""
        arrow = "  <--" if event.low < about.high and about.low < event.high else ""
        line = f"{event.step:6}  {event.task:<18}  {event.what:<16} {where} {event.detail}{arrow}"
        text.append(line.rstrip())
    return "\n".join(text)
