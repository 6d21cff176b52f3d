"""Explore concurrent partitions of the Hopper ``grouped_matmul_combine``: its Gluon source,
translated to Triton.

``tests/support/gluon_as_triton.py`` has the kernel: two programs per multiprocessor, *reduce* and
*multiply*. A mutated copy of the package is read where there is one, since the translation starts
from the imported file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support import gluon_as_triton

from tileweave.explore import search
from tileweave.explore.ranks import MAX_PROGRAMS
from tileweave.explore.scenarios_experts import Combine
from tileweave.kernels.experts import combine_triton as plain
from tileweave.planning.combine import CombineConfig

# num_reduce 0: the translated kernel; num_finish 0: *reduce* draws no tickets.
# Four chunks of one tile column: three are early, two are finished among the tickets of the last
# one.
_CUT = CombineConfig(
    "triton",
    16,
    4,
    8,
    1,
    1,
    1,
    chunks=4,
    groups=2,
    block_tokens=1,
    block_cols=256,
    num_reduce=0,
    num_finish=1,
)
SCENARIOS = (
    Combine("partitions", _CUT, (2, 3), 2, programs=(1, 2, 3), resident=MAX_PROGRAMS),
    Combine(
        "partitions, two chunks",
        replace(_CUT, tile_n=8, chunks=2, groups=3),
        (3,),
        2,
        False,
        programs=(2, 3),
        resident=MAX_PROGRAMS,
    ),
    Combine(
        "partitions, reduce draws none",
        replace(_CUT, num_finish=0),
        (2, 3),
        2,
        programs=(1, 2, 3),
        resident=MAX_PROGRAMS,
    ),
)


def register() -> None:
    """Add the scenarios to ``search``, and send launches with such a config to the translated
    kernel. Once per process, for as long as it lives."""
    theirs = plain.launch

    def launch(*arguments: Any) -> None:
        config = next(a for a in arguments if isinstance(a, CombineConfig))
        (theirs if config.num_reduce else gluon_as_triton.launch)(*arguments)

    plain.launch = launch
    search.SCENARIOS += SCENARIOS


def found_in_partitions(runs: int) -> list[str]:
    """In a worker: violations in ``runs`` interleavings of each strategy and scenario."""
    from tileweave.explore.interpreter import exploring

    register()
    with exploring() as enter:
        ends = [
            search.run(search.Seed(f"{s.op}/{s.name}", 2 + number % 2, strategy, number), enter)
            for s in SCENARIOS
            for strategy in search.STRATEGIES
            for number in range(runs)
        ]
        return [search.story(search.shrink(end, enter)) for end in ends if end.failure is not None]
