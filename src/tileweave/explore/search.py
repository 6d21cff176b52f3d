"""One run of a scenario under a strategy; how to replay it, shrink it, and show what happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tileweave.explore.memory import Violation
from tileweave.explore.ranks import World
from tileweave.explore.scenarios import SCENARIOS, Drawn, Scenario
from tileweave.explore.strategies import Delays, Malice, Noting, Priorities, Walk, Written
from tileweave.explore.tasks import Decision, Event

EPOCHS = (1, 2, 2**31 - 2, -1)  # the first call, the other parity, the wrap to negative numbers, the wrap to zero
Enter = Callable[[World | None], None]


@dataclass(frozen=True)
class Seed:
    """Names one run: ``scenario@world:strategy:number``. Everything about the run follows from it."""

    scenario: str
    world: int
    strategy: str
    number: int

    def __str__(self) -> str:
        return f"{self.scenario}@{self.world}:{self.strategy}:{self.number}"

    @staticmethod
    def parse(text: str) -> Seed:
        scenario, _, rest = text.rpartition("@")
        world, strategy, number = rest.split(":")
        return Seed(scenario, int(world), strategy, int(number))


@dataclass
class Found:
    """How a run ended: after how many steps, and what was wrong (None: nothing)."""

    seed: Seed
    steps: int
    failure: Violation | None
    departures: dict[int, Decision] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    describe: Callable[[int, int], str] = lambda low, high: ""


def scenario_of(name: str) -> Scenario:
    found = {f"{s.op}/{s.name}": s for s in SCENARIOS}
    if name not in found:
        raise KeyError(f"asked: scenario {name!r}; allowed: {', '.join(found)}; remedy: pass one of these")
    return found[name]


def draw(scenario: Scenario, seed: Seed) -> Drawn:
    """What the seed decides besides the schedule. Neighbouring numbers differ in programs and epochs first."""
    choice = random.Random(f"{seed.scenario} {seed.world} {seed.number // 2 if seed.strategy == 'delay' else seed.number}")
    programs = choice.choice(scenario.programs)
    resident = choice.choice((None, None, 1, 2))
    return Drawn(programs, resident and max(resident, scenario.resident), choice.choice(EPOCHS), choice.choice((3, 3, 4)), choice.randrange(1000))


def strategy_of(seed: Seed, world: int) -> Walk | Priorities | Delays | Malice:
    if seed.strategy == "walk":
        return Walk(seed.number)
    if seed.strategy == "pct":
        return Priorities(seed.number)
    if seed.strategy == "delay":
        return delays_of(seed.number, world)
    if seed.strategy == "malice":
        return malice_of(seed.number, world)
    raise KeyError(f"asked: strategy {seed.strategy!r}; allowed: walk, pct, delay, malice; remedy: pass one of these")


def delays_of(number: int, world: int) -> Delays:
    """Number n of the systematic search: no delay, then every single one, then pairs ever farther apart."""
    choice = random.Random(f"delays {number // 2}")
    steps = [number // 2] if number // 2 < 400 else choice.sample(range(400), 2 + number % 2)
    return Delays(frozenset(steps), eager=number % 2 == 0, first=8 * (number // 2 % world))


def malice_of(number: int, world: int) -> Malice:
    """Each rank late, each rank's stores late, each copy engine late; and all pairs of these."""
    per_rank = 8
    everyone = range(world * per_rank)
    singles = []
    for rank in range(world):
        mine = range(rank * per_rank, (rank + 1) * per_rank)
        singles += [(frozenset(mine), frozenset()), (frozenset(), frozenset(mine)), (frozenset({mine[1 + 6]}), frozenset())]
        singles.append((frozenset(mine) - {mine[0], mine[6], mine[7]}, frozenset(everyone)))
    late, stores = singles[number % len(singles)]
    if number >= len(singles):
        other = singles[number // len(singles) % len(singles)]
        late, stores = late | other[0], stores | other[1]
    return Malice(late, stores, turns=(1, 3, 17)[number % 3])


def run(seed: Seed, enter: Enter, departures: dict[int, Decision] | None = None, recording: bool = False) -> Found:
    """One run; ``departures``: replay these in place of the seed's strategy."""
    scenario = scenario_of(seed.scenario)
    drawn = draw(scenario, seed)
    noting = Noting(strategy_of(seed, seed.world) if departures is None else Written(departures))
    world = World(seed.world, drawn.programs, noting, drawn.resident, recording)
    enter(world)
    failure = None
    try:
        world.run(lambda rank: _host(world, rank, scenario, drawn))
        _check_ends(world, scenario, drawn)
    except Violation as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises is a finding
        failure = Violation("error", f"{type(error).__name__}: {error}")
    finally:
        enter(None)
        world.close()
    return Found(seed, world.tasks.step, failure, noting.departures, world.tasks.events, world.tasks.describe)


def _host(world: World, rank: int, scenario: Scenario, drawn: Drawn) -> None:
    scenario.begin(world, rank, drawn)
    for number in range(drawn.calls):
        for name, got, want in scenario.call(world, rank, number, drawn):
            if not torch.equal(got, want):
                rows = (got != want).flatten(1).any(dim=1).nonzero().flatten().tolist()
                raise world.tasks.fail("wrong result", f"rank {rank}, call {number}: {name} differs in rows {rows}")


def _check_ends(world: World, scenario: Scenario, drawn: Drawn) -> None:
    for rank in range(world.size):
        for name, seen, expected in scenario.end(world, rank, drawn):
            if seen != expected:
                raise Violation("left over", f"rank {rank}: {name} {seen}, expected {expected}")
