"""Random tables, bags and jagged lists: pooled vectors equal fp64, distributed lists arrive, or an
error says what is wrong.

``tests/support/properties.py`` has the strategies and the check of a result,
``tests/support/embedding.py`` the oracle.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from tests.support import embedding
from tests.support.embedding import Bags, Case
from tests.support.worlds import Member, Worlds

pytest.importorskip("hypothesis")

from hypothesis import strategies as st
from tests.support.properties import (
    Planted,
    check_result,
    dtypes,
    for_any,
    in_world,
    offsets,
    planted,
    scale_of,
    with_gaps,
    write_special_values,
)

import tileweave as tw
from tileweave.planning.sharding import rows_of


@dataclass(frozen=True)
class Example:
    """``result``: "new", "out", or "again", into an earlier result. ``offset``: by how many
    elements tables, lists and result are off 16 bytes."""

    case: Case
    seed: int
    result: str
    given: bool  # the layout is passed, not exchanged
    offset: tuple[int, int, int]
    planted: Planted


dims = st.lists(st.integers(1, 20), max_size=3).map(tuple)
cases = st.builds(
    Case,
    dims=st.tuples(dims, dims),
    batch=st.integers(0, 9),
    longest=st.integers(0, 5),
    rows=st.integers(0, 12),
    dtype=dtypes,
    out_dtype=st.one_of(st.none(), dtypes),
    mode=st.sampled_from(["sum", "mean"]),
    weighted=st.booleans(),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    giant=st.sampled_from([0, 0, 0, 33, 300]),
    stray=st.booleans(),
    shuffled=st.booleans(),
).map(lambda case: replace(case, weighted=case.weighted and case.mode == "sum"))
EXAMPLES = st.builds(
    Example,
    case=cases,
    seed=st.integers(0, 1000),
    result=st.sampled_from(["new", "out", "again"]),
    given=st.booleans(),
    offset=st.tuples(offsets, offsets, offsets),
    planted=planted,
).map(lambda e: replace(e, given=e.given or e.case.shuffled))


def drawn(example: Example, rank: int) -> Bags:
    bags = embedding.draw(example.case, rank, torch.device("cpu"), example.seed)
    if bags.tables:
        write_special_values(
            [bags.tables[0]] * 2, tuple(one for one in example.planted if one[0] == rank)
        )
    return bags


def check_call(me: Member, example: Example) -> None:
    case, size = example.case, me.world_size
    bags, layout = drawn(example, me.rank), case.layout(size)
    begin, end = rows_of(case.batch, size, me.rank)
    want = torch.full((end - begin, layout.width), float("nan"), dtype=torch.float64)
    largest = 1.0
    for source in range(size):
        theirs = drawn(example, source)
        blocks = embedding.pooled(theirs, case)[begin:end].split(
            [max(d, 0) for d in layout.dims[source]], 1
        )
        for column, dim, block in zip(
            layout.columns[source], layout.dims[source], blocks, strict=False
        ):
            want[:, column : column + dim] = block
        largest = max(
            largest, scale_of(*theirs.tables) * (scale_of(theirs.weights) if case.weighted else 1.0)
        )
    at_tables, at_lists, at_out = example.offset
    weights = None if bags.weights is None else with_gaps(bags.weights, at_lists)
    arguments = (
        [with_gaps(t, at_tables) for t in bags.tables],
        with_gaps(bags.indices, at_lists),
        with_gaps(bags.offsets, at_lists),
    )
    options: dict[str, object] = {
        "batch": case.batch,
        "mode": case.mode,
        "per_sample_weights": weights,
        "out_dtype": case.result_dtype,
        "layout": layout if example.given else None,
    }
    out = None
    if example.result == "out":
        out = with_gaps(torch.full(want.shape, float("nan"), dtype=case.result_dtype), at_out)
    elif example.result == "again":
        out = tw.embedding_bag_all_to_all(*arguments, **options)  # type: ignore[arg-type]
        out.fill_(float("nan"))
    y = tw.embedding_bag_all_to_all(*arguments, out=out, **options)  # type: ignore[arg-type]
    assert y.dtype == case.result_dtype and (out is None or y is out)
    scale = largest * max(1, case.longest, case.giant) ** 0.5
    check_result(y, want, scale)
    if bags.tables:  # the local lookup
        alone = tw.embedding_bag(
            *arguments, mode=case.mode, per_sample_weights=weights, out_dtype=case.result_dtype
        )
        check_result(alone, embedding.pooled(bags, case), scale)


@pytest.mark.timeout(2000)
def test_any_bags(worlds: Worlds) -> None:
    for_any(EXAMPLES, 35, in_world(worlds("gloo", 2), check_call))


def alias_error(me: Member, example: tuple[str, int]) -> str:
    """Pass ``out=`` in the storage of an input. Return the error ("": there is none)."""
    which, shift = example
    storage = torch.zeros(4096)
    table, weights = torch.ones(5, 4), torch.ones(2 * me.world_size)
    if which == "tables":
        table = storage[:20].view(5, 4)
    else:
        weights = storage[: weights.numel()]
    indices = torch.arange(2 * me.world_size) % 5
    out = storage[shift : shift + 2 * 4 * me.world_size].view(2, 4 * me.world_size)
    offsets = torch.arange(2 * me.world_size + 1)
    layout = tw.EmbeddingLayout.in_rank_order([(4,)] * me.world_size)
    try:
        tw.embedding_bag_all_to_all(
            [table], indices, offsets, per_sample_weights=weights, layout=layout, out=out
        )
    except tw.InputError as error:
        return str(error)
    return ""


@pytest.mark.timeout(60)
def test_out_never_shares_memory_with_an_input(worlds: Worlds) -> None:
    world = worlds("gloo", 2)

    def check(example: tuple[str, int]) -> None:
        for text in world.run(alias_error, example):
            assert "storage of an input" in text, f"{example}: {text!r}"

    for_any(st.tuples(st.sampled_from(["tables", "weights"]), st.integers(0, 3000)), 8, check)


# --- distribute_indices ---


@dataclass(frozen=True)
class Lists:
    """``features`` is indexed by rank. The jagged lists of all ranks follow from ``seed``."""

    features: tuple[tuple[int, ...], tuple[int, ...]]
    samples: int
    longest: int
    length_dtype: torch.dtype
    value_dtype: torch.dtype
    weight_dtype: torch.dtype | None
    offset: int
    seed: int

    @property
    def count(self) -> int:
        return max(f for mine in self.features for f in mine) + 1

    def of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        lengths = torch.randint(
            0, self.longest + 1, (self.count * self.samples,), generator=generator
        )
        values = torch.randint(0, 30000, (int(lengths.sum()),), generator=generator).to(
            self.value_dtype
        )
        scales = torch.randn(values.numel(), generator=generator)
        special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, -1e-7])
        scales[::3] = special.repeat(scales.numel())[: scales[::3].numel()]
        return lengths.to(self.length_dtype), values, scales


owned = st.lists(st.integers(0, 4), max_size=4).map(tuple)
LISTS = st.builds(
    Lists,
    features=st.tuples(owned, owned).filter(any),
    samples=st.integers(0, 5),
    longest=st.integers(0, 4),
    length_dtype=st.sampled_from([torch.int32, torch.int64]),
    value_dtype=st.sampled_from([torch.int16, torch.int32, torch.int64]),
    weight_dtype=st.sampled_from([None, torch.float32, torch.float16, torch.bfloat16]),
    offset=offsets,
    seed=st.integers(0, 1000),
)


def check_lists(me: Member, example: Lists) -> None:
    everyone = [example.of(rank) for rank in range(me.world_size)]
    lengths, values, scales = (with_gaps(t, example.offset) for t in everyone[me.rank])
    weights = None if example.weight_dtype is None else scales.to(example.weight_dtype)
    indices, ends, got = tw.distribute_indices(lengths, values, example.features, weights=weights)
    want: list[list] = [[], []]
    want_ends = [0]
    for feature in example.features[me.rank]:
        for theirs in everyone:
            cuts = [0, *theirs[0].long().cumsum(0).tolist()]
            for place in range(feature * example.samples, (feature + 1) * example.samples):
                for into, data in zip(want, theirs[1:], strict=True):
                    into += data[cuts[place] : cuts[place + 1]].tolist()
                want_ends.append(len(want[0]))
    assert indices.dtype == example.value_dtype and indices.tolist() == want[0]
    assert ends.tolist() == want_ends
    assert (got is None) == (weights is None)
    if got is not None:
        assert got.dtype == example.weight_dtype
        exact = torch.tensor(want[1], dtype=torch.float32).to(got.dtype)
        bits = torch.int16 if got.dtype.itemsize == 2 else torch.int32
        assert torch.equal(got.view(bits), exact.view(bits)), "bit by bit, also minus zero"


@pytest.mark.timeout(1000)
def test_any_lists(worlds: Worlds) -> None:
    for_any(LISTS, 60, in_world(worlds("gloo", 2), check_lists))


def pieces_agree(me: Member) -> None:
    """The kernels and plain torch give the same messages, offsets, sums and pieces, for every rank
    of worlds of one to four."""
    from tileweave.kernels.embedding import jagged as jagged_pieces
    from tileweave.ops.embedding.distribute_indices import InTorch

    draw = random.Random(me.rank)
    for case in range(40):
        size, count, samples = draw.randint(1, 4), draw.randint(1, 5), draw.choice([0, 1, 3, 20])
        features = (
            (count - 1,),
            *(tuple(draw.choices(range(count), k=draw.randint(0, 3))) for _ in range(size - 1)),
        )
        generator = torch.Generator().manual_seed(case)
        ranks = range(len(features))
        lengths = [
            torch.randint(-(case % 5 == 0), 4, (count * samples,), generator=generator)
            for _ in ranks
        ]
        bad = any((of < 0).any() for of in lengths)
        with mock.patch.object(jagged_pieces, "BLOCK", 8):
            kernels, plain = (
                _all_ranks(steps, features, count, samples, lengths)
                for steps in (jagged_pieces, InTorch)
            )
        for of_kernels, of_torch in zip(kernels, plain, strict=True):
            whole, (offsets, told, *pieces) = of_kernels
            assert torch.equal(whole, of_torch[0]), case
            assert torch.equal(told, of_torch[1][1]), case
            if not bad:
                assert torch.equal(offsets, of_torch[1][0]), case
                assert all(
                    torch.equal(a.view(-1), b.reshape(-1))
                    for a, b in zip(pieces, of_torch[1][2:], strict=True)
                ), case
        for rank, (_, (_, _, leaving, _)) in enumerate(kernels if not bad else ()):
            data, longest = torch.arange(int(lengths[rank].sum())), max(int(leaving[2::3].max()), 0)
            parts = [torch.full((int(leaving[2::3].sum()),), -9) for _ in range(2)]
            jagged_pieces.move(data, parts[0], leaving, longest)
            InTorch.move(data, parts[1], leaving.view(-1, 3), longest)
            assert torch.equal(*parts) and not (parts[0] == -9).any(), case


def _all_ranks(steps, features, count, samples, lengths):  # type: ignore[no-untyped-def]
    """Per rank: its messages, and what it makes of the ones it receives, exchanged here."""
    from tileweave.ops.embedding.distribute_indices import _layout

    made = []
    for rank, of in enumerate(lengths):
        where, sizes = (
            _layout(features, count, rank, of.device),
            [len(mine) * samples + count + 1 for mine in features],
        )
        whole = torch.full((sum(sizes),), -7)
        steps.pack(of, int(of.sum()), where, whole)
        made.append((sizes, where, whole))
    found = []
    for rank, (_, where, whole) in enumerate(made):
        got = torch.cat([theirs.split(sizes)[rank] for sizes, _, theirs in made])
        found.append((whole, steps.unpack(got, samples, where)))
    return found


def test_kernels_and_torch_make_the_same_pieces(worlds: Worlds) -> None:
    worlds("gloo", 1).run(pieces_agree)


def wrong_lists(me: Member, what: str) -> str:
    """Rank 1 passes a wrong argument: check the error of each rank, and that the next call
    works."""
    lists = Lists(((0, 1), (2,)), 3, 3, torch.int64, torch.int64, None, 0, 5)
    lengths, values, _ = lists.of(me.rank)
    options: dict[str, object] = {}
    if me.rank == 1:
        if what == "values":
            values = values[:-1]
        elif what == "negative":
            lengths = lengths.clone()
            lengths[0] -= 9
            values = values[: int(lengths.sum())]
    said = ""
    try:
        tw.distribute_indices(lengths, values, lists.features, **options)  # type: ignore[arg-type]
    except tw.InputError as error:
        said = str(error)
    check_lists(me, lists)
    return said


@pytest.mark.parametrize(("what", "text"), [("values", "values"), ("negative", "lengths below 0")])
def test_device_side_errors_reach_every_rank(worlds: Worlds, what: str, text: str) -> None:
    for said in worlds("gloo", 2).run(wrong_lists, what):
        assert "rank 1" in said and text in said and "remedy: " in said, said


LOCAL = {
    "weights": (lambda v: {"weights": torch.ones(v.numel() + 1)}, "weights"),
    "features": (lambda v: {"features": [[0, 1], [-1]]}, "features"),
    "ranks": (lambda v: {"features": [[0, 1, 2]]}, "features of 1 ranks"),
    "float": (lambda v: {"values": v.float()}, "values"),
    "shape": (lambda v: {"values": v.view(1, -1)}, "values"),
    "none": (lambda v: {"features": [[], []]}, "no features"),
}


def refused(me: Member, name: str) -> None:
    """A wrong argument on one rank raises there, before anything is sent. The others do not
    call."""
    if me.rank == 0:
        lists = Lists(((0, 1), (2,)), 3, 3, torch.int64, torch.int64, None, 0, 5)
        lengths, values, _ = lists.of(me.rank)
        make, text = LOCAL[name]
        arguments = {"lengths": lengths, "values": values, "features": lists.features} | make(
            values
        )
        with pytest.raises(tw.InputError, match=f"asked: .*{text}.*allowed: .*remedy: "):
            tw.distribute_indices(**arguments)
    tw.close()  # the ranks go on together


@pytest.mark.parametrize("name", LOCAL)
def test_wrong_lists_are_refused_before_sending(worlds: Worlds, name: str) -> None:
    worlds("gloo", 2).run(refused, name)
