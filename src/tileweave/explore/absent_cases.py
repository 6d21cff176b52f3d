"""What runs with absent, late or paused ranks are made of: scenarios, and which ranks are absent.
``absent.py`` runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from tileweave.explore.scenarios import (
    AllGatherMatmul,
    MatmulReduce,
    OneShot,
    triton_config,
)
from tileweave.explore.scenarios_embedding import EmbeddingBag, TableGradient
from tileweave.explore.scenarios_exchange import OUT, Exchanged
from tileweave.explore.search import SCENARIOS as EXPLORED
from tileweave.planning.schedules.scatter import Exchange
from tileweave.planning.sharding import EmbeddingConfig
from tileweave.transport.protocol import PUSHED_US

ENGINE = triton_config("copy_engine")
SCENARIOS = (
    AllGatherMatmul("gather", ENGINE, ((16, 16, 16),), (1, 2, 3)),
    AllGatherMatmul("gather, few tiles", ENGINE, ((16, 8, 16),), (1, 2, 3)),
    AllGatherMatmul("gather, captured", ENGINE, ((16, 16, 16),), (1, 2, 3), captured=True),
    MatmulReduce("scatter", "matmul_reduce_scatter", ENGINE, ((96, 16, 16),), (1, 2, 3)),
    MatmulReduce("scatter, chunks", "matmul_reduce_scatter", ENGINE, ((192, 16, 16),), (1, 2, 3)),
    MatmulReduce("by tiles", "matmul_all_reduce", ENGINE, ((96, 16, 16),), (1, 2, 3)),
    Exchanged("pulled", OUT, ENGINE, ((16, 16, 16),), (Exchange(1, 0),), (1, 2, 3)),
    EmbeddingBag("lookup", (9,), 1, EmbeddingConfig(4, 2, 1, 1, 1)),
)
GATHER = AllGatherMatmul(
    "library gather", triton_config("sm", kernel="library"), ((2, 16, 16),), (1,), gathered=True
)
# rank 1 is paused before it looks whether data of copy engines is there
COPIED_GATHERS = (
    AllGatherMatmul("copied gather", ENGINE, ((16, 16, 16),), (1,)),
    AllGatherMatmul("copied gather, captured", ENGINE, ((16, 16, 16),), (1,), captured=True),
)
# rank 1 is paused before it sums what others pushed
SUMS = TableGradient("groups", 1, 2, "sm")
COPIED_SUMS = TableGradient("groups by copy engines", 1, 2, "copy_engine")
COPIED_SUMS_ALONE = TableGradient("alone by copy engines", 1, 2, "copy_engine", alone=True)
PAUSING: dict[Any, Callable[[bool, int], bool]] = {
    **{scenario: lambda exact, limit: exact for scenario in COPIED_GATHERS},
    **{scenario: lambda exact, limit: limit == PUSHED_US for scenario in (SUMS, COPIED_SUMS)},
}
PAUSED = (
    *COPIED_GATHERS,
    SUMS,
    COPIED_SUMS,
    GATHER,
    OneShot("one shot", triton_config("sm", shots=1), ((3, 16, 16),), norm=False),
    OneShot("one shot, teams", triton_config("sm", shots=1, team=2), ((3, 16, 32),), norm=False),
    MatmulReduce(
        "library",
        "matmul_reduce_scatter",
        triton_config("sm", kernel="library"),
        ((16, 16, 16),),
        (1,),
    ),
    COPIED_SUMS_ALONE,
)
# with one slot: rank 1 goes on when copies of rank 0's second call, given up, have come
HALFWAY = (COPIED_SUMS, COPIED_SUMS_ALONE)
# with two slots of eager calls: not after a capture
READING = (
    COPIED_GATHERS[0],
    AllGatherMatmul(
        "by shards", triton_config("copy_engine", kernel="library"), ((2, 16, 16),), (1,)
    ),
    MatmulReduce("scatter", "matmul_reduce_scatter", ENGINE, ((32, 16, 16),), (1,)),
    MatmulReduce("by tiles", "matmul_all_reduce", ENGINE, ((32, 16, 16),), (1,)),
)


def _of_one_size(scenario: Any) -> Any:
    """The scenario with one size, so that no call after the first one grows memory: ranks grow it
    together, which absent ranks do not."""
    sizes = (
        name
        for name in ("shapes", "tokens", "batches")
        if isinstance(getattr(scenario, name, None), tuple)
    )
    return replace(scenario, **{name: getattr(scenario, name)[-1:] for name in sizes})


# over nodes, an exchange of torch waits for absent ranks: tests/cpu/test_nodes.py
EVERYTHING = tuple(
    _of_one_size(s)
    for s in EXPLORED
    if getattr(s, "sends", True) and not getattr(s, "over_nodes", False)
)
# (world size, ranks that make one call only)
ABSENT = ((2, (0,)), (2, (1,)), (3, (0,)), (3, (2,)), (3, (0, 1)), (3, (1, 2)))
FEW_ABSENT = ABSENT[1], ABSENT[2], ABSENT[5]


class Case(NamedTuple):
    """What one run does, and what it checks. ``how``:

    - "named": some ranks are absent. Checks which rank reports what.
    - "everywhere": the same with every operator. All calls end; some rank reports why, the first
      report names an absent rank; each element of a result is right or NaN.
    - "moments": as "everywhere", but absent ranks arrive while others give up.
    - "paused": rank 1 is paused in its first call, after its pushes. It goes on when rank 0 has
      given up the second call and ended the third, which uses the slot of the first one; with
      ``absent``, when copies of the second one have come. Its first result is right, or NaN, or
      reported.
    - "reading": rank 1 is paused after data of copy engines has come, before it reads that data. It
      is paused in its first call until rank 0 has given up the second one; with ``absent``, in its
      second call, which it begins when rank 0 has come to the third, until rank 0 has ended all.
    """

    how: str
    scenario: Any
    programs: int
    size: int
    absent: tuple[int, ...]
    seed: int

    def __str__(self) -> str:
        name = f"{self.scenario.op}/{self.scenario.name}@{self.size}"
        if self.how == "paused":
            return f"{name}, rank 1 paused{' halfway' * bool(self.absent)}, seed {self.seed}"
        missing = f"without {self.absent}, {self.programs} programs, seed {self.seed}"
        return f"{name} {missing}, {self.how}"


def cases(how: str, every: bool = False) -> Iterator[Case]:
    """The cases of this kind.

    "everywhere" has every second pair of (programs, absent ranks) of each operator, and "moments"
    the other pairs; with ``every`` both have all pairs. Each number of programs and each set of
    absent ranks of a scenario is in both halves.
    """
    if how == "paused":
        for scenario, seed in product(PAUSED, range(4)):
            yield Case(how, scenario, 1, 2, (), seed)
        for scenario, seed in product(HALFWAY, range(2)):
            yield Case(how, scenario, 1, 2, (0,), seed)
    elif how == "reading":
        for scenario, absent, seed in product(READING, ((), (1,)), range(4)):
            yield Case(how, scenario, 1, 2, absent, seed)
    elif how == "named":
        for scenario, programs, (size, absent), seed in product(
            SCENARIOS, (1, 2, 3), ABSENT, range(4)
        ):
            yield Case(how, scenario, programs, size, absent, seed)
    else:
        for scenario in EVERYTHING:
            several = len(scenario.programs) > 1
            pairs = product(scenario.programs, FEW_ABSENT)
            for number, (programs, (size, absent)) in enumerate(pairs):
                if every or not several or number % 2 == (how == "moments"):
                    yield Case(how, scenario, programs, size, absent, 0)
