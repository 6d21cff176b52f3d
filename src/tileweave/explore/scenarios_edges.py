"""Edge cases of kernels that send nothing: no positions, no columns, a last block that is smaller,
addresses that are no multiple of 16 bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tileweave.explore.ranks import World
from tileweave.explore.scenarios import placed, whole_numbers
from tileweave.explore.scenarios_local import Found, Local, near, pooled
from tileweave.explore.scenarios_workspace import equal
from tileweave.planning.schedules.grouped import RoutingCut
from tileweave.planning.sharding import EmbeddingConfig
from tileweave.transport.protocol import FAULT


@contextmanager
def replaced(module: Any, name: str, by: Any) -> Iterator[None]:
    """``module.name`` is ``by`` inside."""
    before = getattr(module, name)
    setattr(module, name, by)
    try:
        yield
    finally:
        setattr(module, name, before)


def lookups(world: World, rank: int, seed: int) -> Found:
    """Tables of 16-bit numbers, or of which no address is a multiple of 16 bytes. The last group of
    blocks is smaller, and one bag ends below what 32 bits hold."""
    from tileweave.kernels.embedding.lookup import Bags, launch

    dims, batch, dtype = (8, 8), 9, (torch.float16, torch.float32)[seed % 2]
    tables = [whole_numbers((5, dim), "table", t, seed).to(dtype) for t, dim in enumerate(dims)]
    if seed % 2:
        tables = [placed(table, 3) for table in tables]
    for table in tables:
        world.know(rank, "table", table)
    indices = (torch.arange(2 * batch * 2) * (seed + 1)).remainder(5)
    offsets = torch.arange(2 * batch + 1) * 2
    if seed % 3 == 0:  # the first bag is empty, and the second one has what is in both
        offsets[1] -= 2**32
    words = [
        (t.data_ptr(), 5, dim, 8 * i) for i, (t, dim) in enumerate(zip(tables, dims, strict=True))
    ]
    out = torch.full((batch, sum(dims)), 7.0)
    config = EmbeddingConfig(4, 1, 1, 1, 1, run=2)
    bags = (indices, offsets, None)
    launch(Bags(torch.tensor(words), *bags), tables, (0, 8), out, batch, False, config)
    yield near("out", out, pooled([table.float() for table in tables], bags, batch, False))


def sums(world: World, rank: int, seed: int) -> Found:
    """No positions, tables without columns, and a tile with rows of two tables, of which each has
    moments."""
    from tileweave.kernels.embedding.table_sums import ADAGRAD, SGD, Numbers, Positions, sum_rows

    dim, count = ((4, 3), (0, 3), (4, 0))[seed % 3]
    rate, first = torch.tensor([2.0]), (0, 6, 12)
    keys, bags = torch.tensor([1, 7, 11][:count]), torch.arange(3, dtype=torch.int32)[:count]
    tables = [whole_numbers((6, dim), "table", t, seed).clone() for t in range(2)]
    states = [torch.ones(6) for _ in range(2)]
    grad = whole_numbers((2, 2 * dim), "gradient", seed).clone()
    for name, parts in (("table", tables), ("state", states)):
        for part in parts:
            world.know(rank, name, part)
    words = [
        (table.data_ptr(), first[t], dim, dim * t, 0, states[t].data_ptr(), 0)
        for t, table in enumerate(tables)
    ]
    want = [table.clone() for table in tables]
    kind = (ADAGRAD, SGD)[seed % 2]
    bags[1:] += 1  # of two samples: the first bag of the first table, both of the second
    for key, bag in zip(keys.tolist(), bags.tolist(), strict=True):
        table, sample = divmod(bag, 2)
        row = 0.5 * grad[sample, dim * table : dim * (table + 1)]
        moment = 1 + row.square().mean()
        step = 2 * row / (moment.sqrt() + 1e-3) if kind == ADAGRAD else 2 * row
        want[table][key - first[table]] -= step
    positions = Positions(keys, bags, None, None, torch.tensor(words), rate=rate)
    numbers = Numbers(1e-3, count, first[-1], 2)
    sum_rows(grad, positions, numbers, 0.5, torch.float32, dim, kind, 1)
    for t in range(2):
        yield near(f"table {t}", tables[t], want[t])


def nothing_to_move(world: World, rank: int, seed: int) -> Found:
    """Ranks that own no table, and pieces without elements. Sizes of ``arange`` are 1 or more, also
    in branches that the interpreter does not run."""
    from tileweave.kernels.embedding import jagged
    from tileweave.ops.embedding.distribute_indices import _layout

    data, out = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    jagged.move(data, out, torch.zeros(2, 3, dtype=torch.int64), 0)
    yield "what nothing moves to", out, torch.zeros_like(out)

    class Kernel:
        def __class_getitem__(cls, grid: Any) -> Any:
            return lambda *given, **options: sizes.update(options)

    sizes: dict[str, int] = {}
    features, samples = ((0, 1), ()), 2
    where = _layout(features, 2, 1, torch.device("cpu"))
    with replaced(jagged, "unpack_kernel", Kernel):
        jagged.unpack(torch.zeros(2 * 3, dtype=torch.int64), samples, where)
    named = ("ARRIVING", "LEAVING", "FEATURES")
    yield equal("sizes", [sizes[name] for name in named], [1, 2, 4])


def tickets(world: World, rank: int, seed: int) -> Found:
    """The last ticket of a piece may be of fewer rows than the others."""
    from tileweave.kernels.embedding import gradient

    class Kernel:
        def __class_getitem__(cls, grid: Any) -> Any:
            return lambda *given, **options: counts.append(given[7:9])

    counts: list[tuple[int, int]] = []
    plan, nothing = torch.zeros(2, 7, dtype=torch.int64), torch.zeros(0)
    fixed: Any = (0, nothing, (), 0, 1, rank, world.size, 16)
    with replaced(gradient, "ROWS", 4), replaced(gradient, "push_gradient_kernel", Kernel):
        for rows in (0, 3, 4, 5):
            peers: Any = None
            gradient.Push(peers, torch.zeros(rows, 4), plan, *fixed).launch()
    yield equal("tickets and those of a piece", counts, [(0, 1), (2, 1), (2, 1), (4, 2)])


def variants(world: World, rank: int, seed: int) -> Found:
    """Ids or tables at no multiple of 16 bytes are another variant of a launch of routing."""
    from tileweave.kernels.experts import routing

    seen: list[Any] = []

    class Launches:
        def __init__(self, *given: Any, **options: Any) -> None: ...

        def __call__(self, call: Any) -> None:
            seen.append(call[0])

    begins, peers = (0, 4, 8, 12, 16, 20, 24), None
    cut, sizes = RoutingCut(1, 4, 1), (3, 2, 2, rank, world.size, 1)
    with replaced(routing, "Launcher", Launches):
        launch: Any = routing.launcher(peers, cut, begins, *sizes)  # type: ignore[arg-type]
    ids, table = torch.zeros(16, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    for of_ids, of_table in ((0, 0), (4, 8), (1, 0), (0, 1)):
        launch(ids[of_ids:], table[of_table:], 3)
    yield equal("variants", [one == seen[0] for one in seen], [True, True, False, False])


def poisoned(world: World, rank: int, seed: int) -> Found:
    """After a time-out, NaN in all that a slot holds and in nothing after it."""
    from tileweave.kernels.embedding.gradient import poison_kernel
    from tileweave.ops.core.registry import endpoint

    instance = world.workspace(rank).instance("poisoned", "sm")
    instance.reserve(64)
    peers, whole = endpoint(instance, torch.float32), torch.zeros(8)
    for fault in (0, 1):
        instance.control[FAULT] = fault
        poison_kernel[(1,)](whole, peers, 5, BLOCK=4)  # type: ignore[arg-type]
        wanted = torch.tensor([bool(fault)] * 5 + [False] * 3)
        yield f"NaN after {fault} faults", whole.isnan(), wanted
    instance.control[FAULT] = 0


SCENARIOS = (
    Local("lookups of edges", lookups),
    Local("sums of edges", sums),
    Local("nothing to move", nothing_to_move),
    Local("tickets of pieces", tickets),
    Local("variants of routing", variants),
    Local("poisoned", poisoned),
)
