"""Which programs push gradients: those on the multiprocessors that should, and the lowest ones."""

from __future__ import annotations

from typing import Any

from tileweave.explore.interpreter import exploring
from tileweave.explore.ranks import COMPONENTS, World
from tileweave.explore.scenarios import Drawn
from tileweave.explore.scenarios_embedding import TableGradient
from tileweave.explore.strategies import Walk
from tileweave.kernels.embedding import gradient

# (multiprocessors, rank, program)
Programs = set[tuple[int, int, int]]


def programs_that_push() -> tuple[Programs, Programs]:
    """In a worker: the programs that might push in a few calls, and those that did."""
    might, did = Programs(), Programs()
    scenario = TableGradient("groups", 1, 2, "sm")

    def noted(function: Any, into: Programs, world: World, multiprocessors: int) -> Any:
        def call(*args: Any) -> None:
            task = world.tasks.current
            assert task is not None, "kernels run in tasks"
            into.add((multiprocessors, task.rank, task.component % COMPONENTS))
            function(*args)

        return call

    functions = {"push_groups": might, "push_tickets": did}
    kept = {name: getattr(gradient, name) for name in functions}
    with exploring() as enter:
        for multiprocessors in (1, 2, 3):
            world = World(2, 3, Walk(0), multiprocessors=multiprocessors)
            enter(world)
            for name, into in functions.items():
                setattr(gradient, name, noted(kept[name], into, world, multiprocessors))

            def body(rank: int, world: World = world) -> None:
                drawn = Drawn(3, None, 1, 1, 0)
                scenario.begin(world, rank, drawn)
                for _ in scenario.call(world, rank, 0, drawn):
                    pass

            try:
                world.run(body)
            finally:
                enter(None)
                world.close()
                for name, function in kept.items():
                    setattr(gradient, name, function)
    return might, did
