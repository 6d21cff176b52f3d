"""The integer maps of a gather: no unit is computed twice or left out, programs wait for lower
programs only, and the device's functions agree with the host's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.device_int32 import Int32

from tileweave.planning.schedules.gather import (
    MIN_SPAN,
    TileSchedule,
    Unit,
    arrival_order,
    cdiv,
    grouped,
    push_order,
    slice_bounds,
    slot_place,
)

WORLD_SIZES = range(2, 9)
thorough = settings(max_examples=200, derandomize=True)


@st.composite
def schedules_over_nodes(draw: st.DrawFn) -> TileSchedule:
    """Schedules of 2 to 4 nodes of 1 to 4 ranks, without bands and with whole tiles per shard."""
    each = draw(st.integers(1, 4))
    size = each * draw(st.integers(2, 8 // each))
    tile = draw(st.sampled_from([16, 32]))
    rows = draw(st.integers(tile, 150))
    return replace(
        draw(schedules()),
        rank=draw(st.integers(0, size - 1)),
        world_size=size,
        rows=rows,
        tile_m=tile,
        band_sources=1,
        cut_bands=False,
        own_first=True,
        per_node=each,
        chunk_tiles=draw(st.integers(1, -(-rows // tile))),
    )


@st.composite
def schedules(draw: st.DrawFn) -> TileSchedule:
    world_size = draw(st.integers(2, 8))
    own_first = draw(st.booleans())
    return TileSchedule(
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        rows=draw(st.integers(1, 150)),
        cols=draw(st.integers(1, 150)),
        depth=draw(st.integers(1, 600)),
        tile_m=draw(st.sampled_from([16, 32, 64, 128])),
        tile_n=draw(st.sampled_from([16, 32, 64, 128])),
        tile_k=draw(st.sampled_from([16, 32, 64, 128])),
        group_m=draw(st.integers(1, 9)),
        num_programs=draw(st.integers(1, 24) | st.just(132)),
        split_tail=draw(st.booleans()),
        band_sources=draw(st.integers(1, world_size - own_first)),
        cut_bands=draw(st.booleans()),
        team=draw(st.sampled_from([1, 1, 2, 3, 4])),
        own_first=own_first,
    )


def all_units(schedule: TileSchedule) -> list[tuple[int, Unit]]:
    return [
        (program, unit)
        for program in range(schedule.num_programs)
        for unit in schedule.units(program)
    ]


# --- Pushes ---


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_pushed_shards_are_where_peers_read_them(size: int) -> None:
    for rank in range(size):
        for place, peer in enumerate(push_order(rank, size)):
            assert slot_place(peer, rank, size, False) == place
            assert slot_place(peer, rank, size, True) == rank, (
                "in rank order where tiles span shards"
            )


@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_each_slot_index_is_used_once(size: int, spans: bool) -> None:
    for rank in range(size):
        sources = [source for source in range(size) if spans or source != rank]
        places = sorted(slot_place(rank, source, size, spans) for source in sources)
        assert places == list(range(len(sources)))
        for rows in (1, 40):
            schedule = TileSchedule(rank, size, rows, 8, 8, 41 if spans else 1, 16, 16, 1, 1)
            assert schedule.slot_rows == rows * len(places), "a slot has room for all of them"


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_no_receiver_has_two_senders(size: int) -> None:
    for step in range(size - 1):
        assert sorted(push_order(rank, size)[step] for rank in range(size)) == list(range(size))
    assert all(sorted([rank, *push_order(rank, size)]) == list(range(size)) for rank in range(size))


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_sources_are_used_as_they_arrive(size: int) -> None:
    for rank in range(size):
        order = arrival_order(rank, size)
        assert order[0] == rank
        assert [push_order(source, size).index(rank) for source in order[1:]] == list(
            range(size - 1)
        )


# --- Tiles and units ---


@thorough
@given(schedules())
def test_each_k_block_of_each_tile_is_done_once(schedule: TileSchedule) -> None:
    done = Counter(
        (unit.tile, k) for _, unit in all_units(schedule) for k in range(unit.k_begin, unit.k_end)
    )
    assert done == Counter(
        (tile, k) for tile in range(schedule.num_tiles) for k in range(schedule.k_blocks)
    )


@thorough
@given(schedules())
def test_each_element_of_the_output_is_in_one_tile(schedule: TileSchedule) -> None:
    covered: Counter[tuple[int, int]] = Counter()
    for first_row, row_limit, col in map(schedule.place, range(schedule.num_tiles)):
        covered.update(
            (row, col) for row in range(first_row, min(first_row + schedule.tile_m, row_limit))
        )
    rows = schedule.world_size * schedule.rows
    assert covered == Counter(
        (row, col) for row in range(rows) for col in range(schedule.tile_cols)
    )
    assert (
        schedule.tile_cols * schedule.tile_n
        >= schedule.cols
        > (schedule.tile_cols - 1) * schedule.tile_n
    )


@thorough
@given(schedules())
def test_sources_are_grouped_in_bands_by_arrival(schedule: TileSchedule) -> None:
    """The own shard alone, if it comes first, then bands of sources. No tile is outside its
    band."""
    if schedule.spans_shards:
        return
    order = arrival_order(schedule.rank, schedule.world_size)
    for tile in range(schedule.num_tiles):
        first_row, row_limit, _ = schedule.place(tile)
        source = first_row // schedule.rows
        assert row_limit == (source + 1) * schedule.rows, "a tile keeps to one source"
        step = order.index(source)
        first, count = 0, 1
        if not (schedule.own_first and step == 0):
            lead = int(schedule.own_first)
            first = lead + (step - lead) // schedule.band_sources * schedule.band_sources
            count = schedule.band_sources
        assert first * schedule.per_source <= tile < (first + count) * schedule.per_source, (
            f"tile {tile} of {source}"
        )


@thorough
@given(schedules())
def test_sources_are_the_ranks_whose_rows_a_unit_reads(schedule: TileSchedule) -> None:
    for _, unit in all_units(schedule):
        rows = range(unit.first_row, min(unit.first_row + schedule.tile_m, unit.row_limit))
        assert schedule.sources(unit) == sorted({row // schedule.rows for row in rows})


@thorough
@given(schedules())
def test_every_rank_is_waited_for(schedule: TileSchedule) -> None:
    """The proof that two slots are enough needs it: a call does not end before every peer has begun
    it."""
    sources = {source for _, unit in all_units(schedule) for source in schedule.sources(unit)}
    assert sources == set(range(schedule.world_size))


@thorough
@given(schedules())
def test_programs_of_a_cut_tile(schedule: TileSchedule) -> None:
    """The owner is the highest program of a tile, and its helpers are right below: no program waits
    for a higher one."""
    shares: dict[int, list[tuple[int, Unit]]] = {}
    for program, unit in all_units(schedule):
        shares.setdefault(unit.tile, []).append((program, unit))
    for units in shares.values():
        owner, helpers, segment = units[0][1].owner, len(units) - 1, units[0][1].segment
        team = schedule.cut(schedule.segment(segment)[1])[1]
        assert {(unit.owner, unit.helpers, unit.segment) for _, unit in units} == {
            (owner, helpers, segment)
        }
        assert sorted(program for program, _ in units) == list(
            range(owner - team * helpers, owner + 1, team)
        )


@thorough
@given(schedules())
def test_program_helps_once_per_segment_and_owns_last(schedule: TileSchedule) -> None:
    """One entry for partial tiles per segment is enough, and an owner has no other work left when
    it waits."""
    for program in range(schedule.num_programs):
        for segment in range(schedule.num_segments):
            units = [unit for unit in schedule.units(program) if unit.segment == segment]
            helping = [n for n, unit in enumerate(units) if unit.owner != program]
            waiting = [n for n, unit in enumerate(units) if unit.owner == program and unit.helpers]
            assert len(helping) <= 1
            assert waiting in ([], [len(units) - 1])
            assert not helping or all(n > helping[0] for n in waiting)


@thorough
@given(schedules())
def test_cut_tiles_are_shared_evenly(schedule: TileSchedule) -> None:
    for segment in range(schedule.num_segments):
        count = schedule.segment(segment)[1]
        whole, team, span = schedule.cut(count)
        assert schedule.num_programs % team == 0
        assert (count - whole) % team == 0, "a team takes a bundle of as many tiles"
        assert count - whole < schedule.num_programs or not schedule.split_tail
        assert span == max(
            MIN_SPAN, cdiv((count - whole) * schedule.k_blocks, schedule.num_programs)
        )
        units = [
            (program, unit) for program, unit in all_units(schedule) if unit.segment == segment
        ]
        loads = Counter({program: 0 for program in range(schedule.num_programs)})
        for program, unit in units:
            loads[program] += unit.k_end - unit.k_begin
        if schedule.split_tail:
            assert max(loads.values()) <= whole // schedule.num_programs * schedule.k_blocks + span
        else:
            assert max(loads.values()) - min(loads.values()) <= schedule.k_blocks


@thorough
@given(schedules())
def test_team_reads_one_k_range_of_consecutive_tiles(schedule: TileSchedule) -> None:
    for segment in range(schedule.num_segments):
        first, count = schedule.segment(segment)
        whole, team, _ = schedule.cut(count)
        for leader in range(0, schedule.num_programs, team):
            crew = [
                [
                    (u.tile, u.k_begin, u.k_end)
                    for u in schedule.units(program)
                    if u.segment == segment
                ]
                for program in range(leader, leader + team)
            ]
            crew = [[part for part in member if part[0] >= first + whole] for member in crew]
            for place, member in enumerate(crew):
                assert member == [(tile + place, begin, end) for tile, begin, end in crew[0]]


@thorough
@given(schedules())
def test_segments_cover_all_tiles(schedule: TileSchedule) -> None:
    segments = [schedule.segment(index) for index in range(schedule.num_segments)]
    tiles = [tile for first, count in segments for tile in range(first, first + count)]
    assert tiles == list(range(schedule.num_tiles))
    if any(unit.helpers for _, unit in all_units(schedule)):
        assert schedule.has_cut_tiles, "parts need memory"


@thorough
@given(schedules())
def test_the_trace_has_a_row_for_each_unit(schedule: TileSchedule) -> None:
    assert (
        max(len(list(schedule.units(program))) for program in range(schedule.num_programs))
        <= schedule.max_units()
    )


@thorough
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12))
def test_grouped_is_a_permutation(rows: int, cols: int, group: int) -> None:
    order = [grouped(index, rows, cols, group) for index in range(rows * cols)]
    assert sorted(order) == [(row, col) for row in range(rows) for col in range(cols)]
    assert all(row // group <= later // group for (row, _), (later, _) in pairwise(order))


@thorough
@given(st.integers(0, 100_000), st.integers(1, 40), st.sampled_from([1, 8, 2048]))
def test_slices_cover_a_shard(total: int, num_slices: int, quantum: int) -> None:
    bounds = [slice_bounds(total, num_slices, index, quantum) for index in range(num_slices)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == total
    assert all(end == begin for (_, end), (begin, _) in pairwise(bounds))
    assert all(begin % quantum == 0 or begin == total for begin, _ in bounds)


# --- The device's functions ---


def device_units(s: TileSchedule, program: int) -> Iterator[Unit]:
    """The units that the loop of the kernel makes with the functions in
    ``device/triton/tiles.py``."""
    from tileweave.device.triton import tiles as device

    d = {source.__name__: source for source in device.SOURCES}
    d["place_in_nodes"] = device.place_in_nodes.fn  # of no Hopper kernel
    numbers = (
        s.rank,
        s.world_size,
        s.rows,
        s.tile_m,
        s.group_m,
        s.num_tiles,
        s.num_segments,
        s.band_sources,
        s.own_first,
        s.team,
        s.tile_rows,
        s.tile_cols,
        s.k_blocks,
    )
    tiles = device.Tiles(*map(Int32, numbers), s.split_tail)
    for part in range(s.num_segments):
        first, count = d["segment"](tiles, Int32(part))
        share = d["share_of"](tiles, Int32(program), Int32(s.num_programs), count)
        for index in range(share.units):
            tile, k_begin, k_end = d["unit_range"](share, Int32(index))
            if s.per_node:
                nodes = Int32(s.per_node), Int32(s.chunk_tiles)
                first_row, row_limit, col = d["place_in_nodes"](tiles, Int32(first + tile), *nodes)
            else:
                first_row, row_limit, col = d["place"](tiles, Int32(first + tile))
            owner, helpers = d["part_range"](share, tile)
            yield Unit(
                first + tile, first_row, row_limit, col, k_begin, k_end, part, owner, helpers
            )


@pytest.mark.skipif(find_spec("triton") is None, reason="device/triton/tiles.py needs triton")
@thorough
@given(schedules())
def test_device_computes_the_same_units(schedule: TileSchedule) -> None:
    for program in range(schedule.num_programs):
        assert list(device_units(schedule, program)) == list(schedule.units(program))


@pytest.mark.skipif(find_spec("triton") is None, reason="device/triton/tiles.py needs triton")
@thorough
@given(schedules_over_nodes())
def test_device_computes_the_same_units_over_nodes(schedule: TileSchedule) -> None:
    for program in range(schedule.num_programs):
        assert list(device_units(schedule, program)) == list(schedule.units(program))


@thorough
@given(schedules_over_nodes())
def test_tiles_over_nodes_are_in_order_of_arrival(schedule: TileSchedule) -> None:
    """Each tile of each source once; the own shard, those of its node, then chunk after chunk of
    the others."""
    s, seen = schedule, []
    for tile in range(s.num_tiles):
        first_row, row_limit, col = s.place(tile)
        source, row = divmod(first_row, s.rows)
        assert row % s.tile_m == 0 and row_limit == (source + 1) * s.rows
        chunk = row // s.tile_m // s.chunk_tiles
        near = source // s.per_node == s.rank // s.per_node
        seen.append((source, row, col, -1 if source == s.rank else 0 if near else 1 + chunk))
    assert len({place[:3] for place in seen}) == s.num_tiles
    stages = [place[3] for place in seen]
    assert stages == sorted(stages)


@pytest.mark.skipif(find_spec("triton") is None, reason="device/triton/tiles.py needs triton")
def test_the_largest_problem_fits_int32() -> None:
    schedule = TileSchedule(7, 8, 32768, 131072, 65536, 64, 64, 32, 8, 132, True, 3, True, 2)
    for program in (0, 131):
        device, host = device_units(schedule, program), schedule.units(program)
        assert all(a == b for a, b in zip(device, host, strict=True))
