"""Scenarios of kernels that send nothing: lookups, sums by table row, rows of experts, lengths and
values that leave and arrive, quantisation, norms.

They have no interleavings of ranks, but the checks of memory and of programs of one grid, and
results that are compared. Each draws what it runs on from the seed: ragged bags, runs of every
length, sizes that are no power of two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch

from tileweave.explore.ranks import World
from tileweave.explore.scenarios import POOL, Drawn, placed, whole_numbers
from tileweave.planning.sharding import EmbeddingConfig

Found = Iterator[tuple[str, torch.Tensor, torch.Tensor]]
STRAY = 2**31 - 1  # an index that no table has


@dataclass(frozen=True)
class Local:
    """``body(world, rank, seed)`` runs kernels and yields (name, result, what it must equal)."""

    name: str
    body: Callable[[World, int, int], Found]
    op: str = "local"
    programs: tuple[int, ...] = (1,)
    resident: int = 1
    sends: ClassVar[bool] = False

    def begin(self, world: World, rank: int, drawn: Drawn) -> None:
        """There is nothing that calls share."""

    def call(self, world: World, rank: int, number: int, drawn: Drawn) -> Found:
        yield from self.body(world, rank, (number + drawn.order) % POOL)

    def end(self, world: World, rank: int, drawn: Drawn) -> Iterator[tuple[str, int, int]]:
        return iter(())


def near(
    name: str, got: torch.Tensor, want: torch.Tensor
) -> tuple[str, torch.Tensor, torch.Tensor]:
    """A result that need not be exact: what is close counts as equal."""
    right = torch.isclose(got.float(), want.float(), rtol=2e-5, atol=1e-5)
    return name, torch.where(right, want.to(got.dtype), got), want.to(got.dtype)


def bags_of(
    seed: int, tables: list[torch.Tensor], batch: int, weighted: bool, longest: int = 3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(indices, offsets, weights) of ragged bags, one of them long, and of indices that are out of
    range. The first positions and the last ones are in no bag."""
    draw = random.Random(f"bags {seed}")
    lengths = [draw.randint(0, longest) for _ in range(len(tables) * batch)]
    lengths[draw.randrange(len(lengths))] = 4 * longest + 5
    offsets = torch.tensor([0, *lengths]).cumsum(0) + seed % 2
    count = int(offsets[-1]) + seed % 3
    indices = torch.tensor([draw.randrange(tables[0].shape[0]) for _ in range(count)])
    for stray in (-1, tables[0].shape[0], tables[-1].shape[0], STRAY):
        indices[draw.randrange(count)] = stray
    if seed % 7 == 4:  # which bags end outside is for the kernel to find out
        offsets[0], offsets[-1] = -2, count + 3
    weights = whole_numbers((count,), "weights", seed).clone()
    bags = torch.searchsorted(offsets, torch.arange(count), right=True) - 1
    of_table = bags.clamp(0, len(lengths) - 1) // batch
    rows = torch.tensor([table.shape[0] for table in tables])[of_table]
    weights[(indices < 0) | (indices >= rows)] = float("inf")  # of nothing
    return indices, offsets, weights if weighted else None


def pooled(
    tables: list[torch.Tensor],
    bags: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    batch: int,
    mean: bool,
) -> torch.Tensor:
    """The result of a lookup, by a loop over bags."""
    indices, offsets, weights = bags
    whole = torch.zeros(batch, sum(table.shape[1] for table in tables))
    column = 0
    for t, table in enumerate(tables):
        for sample in range(batch):
            ends = offsets[t * batch + sample : t * batch + sample + 2]
            begin, end = ends.clamp(0, indices.numel()).tolist()
            for at in range(begin, end):
                if 0 <= int(indices[at]) < table.shape[0]:
                    scale = 1.0 if weights is None else weights[at]
                    row = whole[sample, column : column + table.shape[1]]
                    row += scale * table[int(indices[at])]
            if mean:
                whole[sample, column : column + table.shape[1]] /= max(end - begin, 1)
        column += table.shape[1]
    return whole


def lookup(world: World, rank: int, seed: int) -> Found:
    from tileweave.kernels.embedding.lookup import Bags, launch

    dims, batch, mean = ((8, 16), (4, 24), (5, 3))[seed % 3], 5, seed % 2 == 1
    if seed == 3:  # a multiple of four elements, and not of eight, as rows of fp16 need
        dims = (4, 4)
    tables = [whole_numbers((7 + t, dim), "table", t, seed).clone() for t, dim in enumerate(dims)]
    weighted = seed % 4 >= 2
    bags = bags_of(seed, tables, batch, weighted, 4 if seed == 6 else 3)
    if seed == 4:
        tables[0] = placed(tables[0], 3)  # no multiple of 16 bytes
    for table in tables:
        world.know(rank, "table", table)
    config = EmbeddingConfig(4, 1 + seed % 2, 1, 1, 1, run=seed % 2)
    nothing = torch.zeros(1, 0)
    launch(Bags(torch.zeros(4), *bags), [], (), nothing, 1, mean, config)
    apart = int(seed % 3 == 2)  # where all sizes and columns are odd, or no multiple of 4
    columns = (apart, apart + dims[0])
    words = [
        (t.data_ptr(), t.shape[0], t.shape[1], c) for t, c in zip(tables, columns, strict=True)
    ]
    dtype = torch.float16 if seed == 3 else torch.float32
    out = torch.full((batch, apart + sum(dims)), 7.0, dtype=dtype)
    launch(Bags(torch.tensor(words), *bags), tables, columns, out, batch, mean, config)
    yield near("out", out[:, apart:], pooled(tables, bags, batch, mean))
    yield "columns of others", out[:, :apart], torch.full_like(out[:, :apart], 7.0)


def table_sums(world: World, rank: int, seed: int) -> Found:
    """Runs of 1 to 60 positions, in every kind of step."""
    from tileweave.kernels.embedding.table_sums import Numbers, Positions, sum_rows
    from tileweave.ops.embedding.table_gradient import (
        Lookups,
        Update,
        sort_lookups,
        table_gradients,
    )

    draw = random.Random(f"runs {seed}")
    kind = ("dense", "sgd", "adagrad", "sparse")[seed % 4]
    dims, batch = ((8, 16), (8, 8), (5, 3))[seed % 3], 4
    tables = [whole_numbers((6, dim), "table", t, seed).clone() for t, dim in enumerate(dims)]
    runs = [draw.choice((0, 1, 2, 7, 8, 9, 16, 17, 24, 25)) for _ in range(5)] + [
        draw.choice((17, 25, 33, 60))
    ]
    draw.shuffle(runs)
    if seed in (2, 5):  # the last run is long and ends with a tile
        runs = [9, 0, 3, 1, 0, 8 * seed + 3]
    if (
        seed == 6
    ):  # a long run begins with a tile; the last one ends with the second tile of its own
        runs = [8, 25, 4, 0, 0, 11]
    indices = [row for row, run in enumerate(runs) for _ in range(run)]
    draw.shuffle(indices)
    half = draw.randrange(len(indices) + 1)  # the first table has these positions
    half = len(indices) if seed in (2, 5, 6) else half  # where runs are to be as above
    edges = sorted(draw.randrange(half + 1) for _ in range(batch - 1))
    more = sorted(draw.randint(half, len(indices)) for _ in range(batch - 1))
    offsets = torch.tensor([0, *edges, half, *more, len(indices)])
    chosen = torch.tensor(indices)
    if seed % 2:
        chosen[draw.randrange(half if seed == 3 else len(indices))] = STRAY
        chosen[0] = STRAY  # in the first table: bags of such positions say nothing of a tile's last
    weights = whole_numbers(chosen.shape, "weights", seed).clone() if seed % 3 == 1 else None
    lookups = Lookups(chosen, offsets, weights, batch, False)
    grad = whole_numbers((batch, sum(dims)), "gradient", rank, seed).clone()
    rate, first = torch.tensor([2.0]), [0, 6, 12]
    states = [whole_numbers((6,), "state", t, seed).abs() for t in range(2)]
    want = [table.clone() for table in tables]
    moments = [state.clone() for state in states]
    ordered = sort_lookups(tables, lookups, False)
    update = Update(kind, moments, rate, 1e-3)
    made = table_gradients(grad, want, lookups, ordered, 0.5, update, compiled=False)
    keys = ordered.keys if seed % 2 else ordered.keys.int()
    keys = torch.cat([keys, keys[-1:]])[:-1]  # after them comes what could be one more of the last
    opens = torch.ones_like(keys, dtype=torch.bool)
    opens[1:] = keys[1:] != keys[:-1]
    opens &= keys < first[-1]
    places, found, ends = None, [table.clone() for table in tables], [0, 0, 0]
    if kind == "dense":
        found = [torch.zeros_like(table) for table in tables]
    elif kind == "sparse":
        places = torch.cumsum(opens, 0) - 1
        ends = torch.searchsorted(keys[opens].long(), torch.tensor(first)).tolist()
        found = [table.new_empty(ends[t + 1] - ends[t], dims[t]) for t, table in enumerate(tables)]
    states = [state.clone() for state in states]
    for name, parts in (("table", found), ("state", states)):
        for part in parts:
            world.know(rank, name, part)
    columns = (0, dims[0])
    words = [
        (found[t].data_ptr(), first[t], dims[t], columns[t], 0, states[t].data_ptr(), ends[t])
        for t in range(2)
    ]
    bags, scales = ordered.bags.int(), ordered.scales
    aligned = 4 if all(dim % 4 == 0 for dim in dims) else 1
    positions = Positions(keys, bags, scales, places, torch.tensor(words), rate=rate)
    numbers = Numbers(1e-3, keys.numel(), first[-1], batch)
    sum_rows(grad, positions, numbers, 0.5, tables[0].dtype, max(dims), _KINDS[kind], aligned)
    if kind in ("dense", "sparse"):
        want = [one.to_dense() for one in made]
    if kind == "sparse":
        rows = keys[opens].long()
        want = [w[rows[ends[t] : ends[t + 1]] - first[t]] for t, w in enumerate(want)]
    for t in range(2):
        yield near(f"{kind} {t}", found[t], want[t])
        if kind == "adagrad":
            yield near(f"state {t}", states[t], moments[t])


_KINDS = {"dense": 0, "sparse": 1, "sgd": 2, "adagrad": 3}


def keys_of_ragged_bags(world: World, rank: int, seed: int) -> Found:
    from tileweave.kernels.embedding.table_sums import find_keys
    from tileweave.ops.embedding.table_gradient import Lookups, keys_in_torch

    tables, batch = [torch.zeros(5, 4), torch.zeros(6, 4), torch.zeros(3, 4)], (1, 3, 2)[seed % 3]
    seed += 7 * (seed == 4)  # offsets inside
    indices, offsets, _ = bags_of(seed, tables, batch, False)
    # one table has more rows than 32 bits count
    first = [0, 5, 11, 14] if seed < 4 else [0, 5, 2**31 + 5, 2**31 + 8]
    if seed == 6:  # the last key is the first that 32 bits do not hold
        first = [0, 5, 2**31 - 3, 2**31]
    if seed == 2:
        indices, offsets = indices[:0], torch.zeros_like(offsets)
    want_keys, want_bags = keys_in_torch(
        tables, Lookups(indices, offsets, None, batch, False), first
    )
    keys, bags = find_keys(indices, offsets, torch.tensor(first), first[-1], batch)
    yield "keys", keys.long(), want_keys
    inside = want_keys < first[-1]
    yield "bags", bags.long()[inside], want_bags[inside]


def jagged(world: World, rank: int, seed: int) -> Found:
    """Lengths and values of all sources, between which torch moves the messages."""
    from tileweave.kernels.embedding import jagged as steps
    from tileweave.ops.embedding.distribute_indices import InTorch, _layout

    drawn = ((0, 1), (2,)), ((1,), (0, 2, 1)), ((0,), (0,)), ((3, 1), (0,)), ((0,), (1,), (0,))
    features = drawn[seed % 5]
    count = 1 + max(map(max, features))
    samples = 6 if seed == 2 else 1 + seed % 5
    size = len(features)
    generator = torch.Generator().manual_seed(seed)
    lengths = [
        torch.randint(0, 4, (count * samples,), generator=generator, dtype=torch.int32)
        for _ in range(size)
    ]
    if seed % 3 == 2:
        lengths[1][seed % lengths[1].numel()] = -2
    values = [torch.arange(int(one.clamp(min=0).sum())) + 100 * s for s, one in enumerate(lengths)]
    wheres = [_layout(features, count, r, torch.device("cpu")) for r in range(size)]
    sizes = [len(mine) * samples + count + 1 for mine in features]
    messages = []
    for source in range(size):
        whole, want = torch.full((2, sum(sizes)), -9).unbind()
        whole, want = whole.clone(), want.clone()
        steps.pack(lengths[source], values[source].numel(), wheres[source], whole)
        InTorch.pack(lengths[source], values[source].numel(), wheres[source], want)
        yield f"messages of {source}", whole, want
        messages.append(want.split(sizes))
    if seed % 3 == 2:
        return  # a length below 0 is refused when messages have come
    for owner in range(size):
        got = torch.cat([parts[owner] for parts in messages])
        mine = steps.unpack(got, samples, wheres[owner])
        wanted = InTorch.unpack(got, samples, wheres[owner])
        names = ("offsets", "told", "leaving", "arriving")
        for name, one, other in zip(names, mine, wanted, strict=True):
            yield name, one, other.view(one.shape)
        pieces = wanted[2]
        longest = max(pieces[:, 2].tolist())
        out, want = (torch.full((4 * values[owner].numel(),), -9) for _ in range(2))
        steps.move(values[owner], out, mine[2], longest)
        InTorch.move(values[owner], want, pieces, longest)
        yield "values that leave", out, want


def expert_rows(world: World, rank: int, seed: int) -> Found:
    """What backward of the expert operators does with rows."""
    from tileweave.explore.scenarios_dispatch import _ids
    from tileweave.kernels.experts import rows as kernels
    from tileweave.ops.experts.routing_plan import reference_plan

    size, most, topk, experts = 3, 3 + seed % 2, 2, 2
    rank %= size  # it computes alone, in worlds of other sizes, too
    width = (8, 24, 5)[seed % 3]
    ids = _ids(most, topk, experts, size, seed)
    if seed in (3, 4):  # as many rows as there can be
        ids = rank * experts + ids % experts
    if seed == 5:  # rank 0 has no tokens
        ids[0] = -1
    plan = reference_plan(ids, rank, experts * size)
    rows, entries = int(plan.offsets[-1]), plan.row_entry
    tokens = [whole_numbers((most, width), "x", r, seed) for r in range(size)]
    kept = torch.stack([tokens[(rank - 1 - i) % size] for i in range(size - 1)])
    x = tokens[rank][: 0 if seed == 5 and rank == 0 else most].clone()
    got = kernels.gather_rows(x, kept, plan.fields, experts, most, topk, rank, size)
    want = torch.cat(tokens)[entries[:rows].long() // topk]
    yield "rows", got[:rows], want

    offsets = plan.offsets.clone()
    gradient = whole_numbers((experts, 41, 25), "experts", seed).clone()
    empty = offsets[1:] == offsets[:-1]
    want = torch.where(empty[:, None, None], 0.0, gradient)
    kernels.zero_unused(gradient, offsets)
    yield "gradients of experts without rows", gradient, want

    wide = 1025 if seed == 0 else width
    y = whole_numbers((plan.bound, 2 * wide), "y", seed).clone()
    gate, up = y[:rows].chunk(2, 1)
    out = torch.full((plan.bound, wide), 7.0)
    kernels.swiglu(y, out, offsets, experts)
    yield near("swiglu", out[:rows], torch.nn.functional.silu(gate) * up)
    yield "rows past the last", out[rows:], torch.full((plan.bound - rows, wide), 7.0)
    grad = whole_numbers((plan.bound, wide), "grad", seed).clone()
    both = y[:rows].clone().requires_grad_()
    (torch.nn.functional.silu(both[:, :wide]) * both[:, wide:]).backward(grad[:rows])
    out = torch.full((plan.bound, 2 * wide), 7.0)
    kernels.swiglu_gradient(grad, y, out, offsets, experts)
    assert both.grad is not None, "backward made it"
    yield near("gradient of swiglu", out[:rows], both.grad)
    yield "rows past the last", out[rows:], torch.full((plan.bound - rows, 2 * wide), 7.0)
    yield from _weighed(world, rank, seed, plan, 2049 if seed == 1 else width)


def _weighed(world: World, rank: int, seed: int, plan, width: int) -> Found:
    from tileweave.kernels.experts.rows import weigh_rows

    rows, count = int(plan.offsets[-1]), plan.fields[2].numel()
    entries = plan.row_entry[:rows].long()
    g, y = (whole_numbers((plan.bound, width), name, seed).clone() for name in "gy")
    weights = whole_numbers((count,), "topk", seed).clone() if seed % 2 else None
    factors = torch.ones(rows) if weights is None else weights[entries]
    dots = torch.zeros(count).index_put((entries,), (g * y)[:rows].sum(1))
    scaled, same = g.clone(), y.clone()
    scaled[:rows] *= factors[:, None]
    weighted = torch.full_like(y, 7.0) if seed % 3 else None
    yield "dots", weigh_rows(g, y, weights, weighted, plan.fields, 2), dots
    yield "weighted gradients", g, scaled
    yield "what was saved for backward", y, same
    if weighted is not None:
        want = torch.full_like(y, 7.0)
        want[:rows] = y[:rows] * factors[:, None]
        yield "weighted rows", weighted, want


def guarded(blocks: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros for scales [blocks, rows], of one block [rows], and those after them."""
    whole = torch.zeros(blocks + 1, rows)
    return whole[0] if blocks == 1 else whole[:blocks], whole[blocks:]


def quantised(world: World, rank: int, seed: int) -> Found:
    from tileweave.kernels.all_reduce.norm import norm_launcher, norm_quantize_launcher
    from tileweave.kernels.quantize import Pitch, columns_launchers, quantize_launcher
    from tileweave.ops.matmul.quantize import FP8, _in_torch

    rows, depth = ((3, 65), (2, 257), (4, 2049), (3, 384), (2, 40))[seed % 5]
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-14, 4, (rows, 1), generator=generator)
    x = (torch.randn(rows, depth, generator=generator) * scale).to(
        (torch.float32, torch.bfloat16)[seed % 2]
    )
    x[seed % rows] = 0
    if seed == 3:  # scales are 1, and odd numbers above 16 are ties
        x[1] = torch.arange(depth) % 128 + 1
        x[1, ::128] = 448
    if seed > 3:
        x[0, depth // 2], x[-1, 1] = float("nan"), float("-inf")
    for kind, powers in (("row", False), ("row", True), ("block", False), ("block", True)):
        blocks = kind == "block"
        data = torch.zeros(x.shape, dtype=torch.uint8)
        scales, after = guarded(-(-depth // 128), rows) if blocks else guarded(1, rows)
        launch = quantize_launcher(rows, depth, blocks, powers)
        launch(placed(x, 3), data, scales)  # where no 16 bytes begin: another variant
        launch(x, data, scales)
        want, wide = _in_torch(x, kind, powers)
        wide = wide.t().contiguous() if blocks else wide.view(-1)
        yield f"scales of a {kind}", scales, wide
        yield f"after the scales of a {kind}", after, torch.zeros_like(after)
        yield f"data by {kind}", data.view(FP8).float(), want.float()
        if not blocks:  # rows of another tensor, by the same launch
            other = 3 * x.flip(0)[1:]
            made = [torch.zeros(t.shape, dtype=torch.uint8) for t in (x, other)]
            (first, after), (second, rest) = (guarded(1, len(t)) for t in (x, other))
            launch = quantize_launcher(rows, depth, False, powers, other_rows=len(other))
            for one, two in ((placed(x, 3), other), (x, placed(other, 3))):
                launch(one, made[0], first, two, made[1], second)
            for t, bits, found in ((x, made[0], first), (other, made[1], second)):
                want_of, wide_of = _in_torch(t, kind, powers)
                yield "data of both", bits.view(FP8).float(), want_of.float()
                yield "scales of both", found, wide_of.view(-1)
            yield (
                "after the scales of both",
                torch.cat((after[0], rest[0])),
                torch.zeros(2 * rows - 1),
            )
        if blocks:  # scales follow the data of each row, as tokens travel
            count = -(-depth // 128)
            apart = -(-depth // 4) * 4 + 4 * count
            tokens = torch.zeros(rows, apart, dtype=torch.uint8)
            part = tokens[:, apart - 4 * count :].view(torch.float32)
            pitch = Pitch(apart, apart // 4, 1)
            quantize_launcher(rows, depth, blocks, powers, pitch)(x, tokens, part)
            yield "data of tokens", tokens[:, :depth].view(FP8).float(), want.float()
            yield "scales of tokens", part, wide.t()
    for whole in (False, True) if seed in (1, 4) else ():  # rows for two programs, the last largest
        tall = x.t() if whole else x.repeat(300 // rows, 1)[:, : 300 // rows]
        tall = (tall * (1 + torch.arange(tall.shape[0]))[:, None]).to(x.dtype).contiguous()
        count, cols = tall.shape
        other = tall.flip(0)[:, : 0 if whole else 1 + cols // 2]  # turned by the same launches
        tensors = (tall,) if whole else (tall, 3 * other.contiguous())
        both = torch.zeros(cols + other.shape[1], dtype=torch.int32)
        maxima = both[:cols], both[cols:]
        data = [torch.full((t.shape[1] + 1, count + 5), 7, dtype=torch.uint8) for t in tensors]
        scales, after = zip(*(guarded(1, t.shape[1]) for t in tensors), strict=True)
        find, turn = columns_launchers(count, cols, count + 5, whole, other.shape[1])
        for sources in ([placed(tensors[0], 3), tensors[-1]], [tall, placed(tensors[-1], 3)]):
            find(*sources, both)
            turn(*sources, both, data[0], data[-1], scales[0], scales[-1])
        for t, found, each, one, rest in zip(tensors, maxima, data, scales, after, strict=False):
            size, sizes = t.shape[1], t.float().abs()
            want, wide = _in_torch(t if whole else t.t(), "tensor" if whole else "row", True)
            want = torch.nn.functional.pad((want.t() if whole else want).float(), (0, 5))
            most = sizes.amax(0)
            if whole:
                most = torch.nn.functional.pad(most.amax().view(1), (0, size - 1))
            yield "maxima of columns", found.view(torch.float32), most
            yield "data of columns", each[:size].view(FP8).float(), want
            yield "scales of columns", one, wide.view(-1).expand(size)
            yield "after columns", each[size:], torch.full_like(each[size:], 7)
            yield "after the scales of columns", rest, torch.zeros_like(rest)
    if depth > 2000:
        return
    y = torch.randn(rows, depth, generator=generator)
    gain, eps = torch.randn(depth, generator=generator), 1e-5
    want = torch.nn.functional.rms_norm(y, (depth,), gain, eps)
    out = torch.full_like(y, float("nan"))
    norm_launcher(rows, depth)(y, gain, eps, out)
    yield near("norm", out, want)
    for in_blocks in (False, True):
        data = torch.zeros(rows, depth, dtype=torch.uint8)
        scales, after = guarded(-(-depth // 128) if in_blocks else 1, rows)
        norm_quantize_launcher(rows, depth, in_blocks)(y, gain, eps, data, scales)
        numbers, wide = _in_torch(want, "block" if in_blocks else "row")
        wide = wide.t().contiguous() if in_blocks else wide.view(-1)
        yield near("scales of a norm", scales, wide)
        yield "after the scales of a norm", after, torch.zeros_like(after)
        # one step of FP8 apart where a quotient is near a tie
        apart = (data.view(FP8).float() - numbers.float()).abs()
        step = numbers.float().abs() / 8 + 2.0**-9
        yield "data of a norm", (apart <= step).float(), torch.ones(rows, depth)


def large_sizes(world: World, rank: int, seed: int) -> Found:
    """Sizes that need 64 bits are another variant of a launch."""
    from tileweave.kernels.all_gather.await_shards import shard_launches
    from tileweave.kernels.embedding.bag_all_to_all import Samples, launcher
    from tileweave.kernels.embedding.lookup import constants

    peers: Any = ()
    gather = shard_launches(peers, 2, 0, (2, 4), 1).end_gather
    made, cut = constants([], (), 1, 4, EmbeddingConfig()), EmbeddingConfig()
    bags = launcher(peers, 0, 2, Samples(2, 1, 1, 2), 0, made, False, 1, cut)
    small = torch.zeros(1, dtype=torch.int64)
    variants = []
    for size in (2**31 - 1, 2**31):
        large = torch.empty(size, device="meta")
        more = bags._pack(small, large, small, None, 0)[0]
        variants += [gather._pack([large])[0], more]
    same = [variants[i] == variants[i + 2] for i in range(2)]
    yield "variants are told apart", torch.tensor(same), torch.tensor([False, False])


def scaled_rows(world: World, rank: int, seed: int) -> Found:
    """FP8 rows times the weights of their experts. There is no row after the last one, which the
    last tile reads no further than; of some seeds rows are further apart than they are long."""
    from tileweave.ops.experts.scaled import ScaledExperts, ScaledRows, multiply_rows
    from tileweave.ops.matmul.scaled import FP8

    ends = ((0, 17, 17, 21), (0, 0, 16, 19), (0, 3, 36, 37))[seed % 3]
    cols, depth = ((144, 32), (16, 144))[seed % 2]
    rows, experts = ends[-1], len(ends) - 1
    powers = 2.0 ** whole_numbers((rows, 1 + depth // 128), "scale", seed)
    w_scale = 2.0 ** whole_numbers((experts, 1 + cols // 128, 1 + depth // 128), "w scale", seed)
    whole = whole_numbers((rows, depth + 16 * (seed % 3)), "x", seed).to(FP8)
    x = ScaledRows(whole[:, :depth], powers)
    w = ScaledExperts(whole_numbers((experts, cols, depth), "w", seed).to(FP8), w_scale)
    want = torch.full((rows + 3, cols), 7.0, dtype=torch.float16)
    for expert, (begin, end) in enumerate(pairwise(ends)):
        want[begin:end] = (x.value()[begin:end] @ w.value(expert).t()).half()
    y, offsets = torch.full_like(want, 7.0), torch.tensor(ends, dtype=torch.int32)
    for name, part in (("rows", whole), ("scales", powers)):
        world.know(rank, name, part)
    multiply_rows(x, w, offsets, y[:rows])
    yield "products, and nothing after them", y, want


def swiglu_in_fp8(world: World, rank: int, seed: int) -> Found:
    """One row's NaN is of no other row, and of one block of its own."""
    from tileweave.kernels.experts.rows import swiglu_quantized
    from tileweave.ops.matmul.quantize import FP8, _in_torch

    rows, wide = 5, (160, 1168, 40, 384)[seed % 4]
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(rows, 2 * wide, generator=generator).half()
    y[1, wide], y[2, 0] = float("nan"), float("nan")  # what follows the gates, and the row
    gate, up = y[:-1].float().chunk(2, 1)
    value = torch.nn.functional.silu(gate) * up
    numbers, scales = _in_torch(value.half(), "block")
    data = torch.full((rows, wide), 7, dtype=torch.uint8)
    whole = torch.full((scales.shape[1] + 1, rows), 7.0)
    got = whole[:-1]
    offsets = torch.tensor([0, 3, rows - 1], dtype=torch.int32)
    swiglu_quantized(y, data, got, offsets, 2)
    near_scales = torch.isclose(got[:, :-1].t(), scales, rtol=2e-3, equal_nan=True)
    yield "scales of blocks", near_scales, torch.ones_like(near_scales)
    found, numbers = data[:-1].view(FP8).float(), numbers.float()
    # one step of FP8 apart where a quotient is near a tie
    right = (found - numbers).abs() <= numbers.abs() / 8 + 2.0**-9
    right |= found.isnan() & numbers.isnan()
    yield "numbers", right, torch.ones_like(right)
    yield "numbers after the last row", data[-1], torch.full_like(data[-1], 7)
    yield "scales after the last row", got[:, -1], torch.full_like(got[:, -1], 7.0)
    yield "after the scales", whole[-1], torch.full((rows,), 7.0)


SCENARIOS = (
    Local("large sizes", large_sizes),
    Local("lookup", lookup),
    Local("table sums", table_sums),
    Local("keys", keys_of_ragged_bags),
    Local("jagged", jagged),
    Local("rows of experts", expert_rows),
    Local("quantised", quantised),
    Local("rows of FP8", scaled_rows),
    Local("swiglu in FP8", swiglu_in_fp8),
)
