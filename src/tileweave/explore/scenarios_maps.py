"""The maps of tiles on the device are those of the host: random schedules, unit by unit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tileweave.explore.ranks import World
from tileweave.explore.scenarios_local import Found, Local
from tileweave.planning.schedules.gather import TileSchedule, grouped
from tileweave.planning.schedules.scatter import ScatterSchedule

EACH = 8  # schedules of each kind in one call


def _drawn(draw: random.Random) -> dict[str, Any]:
    size = draw.choice((2, 3, 4, 8))
    return {
        "rank": draw.randrange(size),
        "world_size": size,
        "rows": draw.choice((1, 5, 15, 16, 17, 32, 33, 48, 81, 100)),
        "cols": draw.choice((1, 16, 17, 48)),
        "depth": draw.choice((8, 24, 40, 56, 96)),
        "tile_m": 16,
        "tile_n": 16,
        "tile_k": 8,
        "group_m": draw.choice((1, 2, 3, 4)),
        "num_programs": draw.choice((1, 2, 3, 4, 6, 8)),
        "split_tail": draw.random() < 0.7,
        "team": draw.choice((1, 1, 2, 3, 4)),
    }


def _of_gather(draw: random.Random) -> TileSchedule:
    drawn = _drawn(draw)
    bands = draw.randint(1, drawn["world_size"])
    return TileSchedule(
        **drawn, band_sources=bands, cut_bands=draw.random() < 0.5, own_first=draw.random() < 0.5
    )


def _over_nodes(draw: random.Random) -> TileSchedule:
    each = draw.randint(1, 3)
    size = each * draw.randint(2, 3)
    rows = draw.choice((16, 17, 33, 64, 81))
    whole = {"rank": draw.randrange(size), "world_size": size, "rows": rows, "own_first": True}
    made = replace(_of_gather(draw), band_sources=1, cut_bands=False, **whole)
    return replace(made, per_node=each, chunk_tiles=draw.randint(1, -(-rows // 16)))


def _of_scatter(draw: random.Random) -> ScatterSchedule:
    return ScatterSchedule(**_drawn(draw), chunk_rows=draw.choice((1, 2, 3, 1 << 20)))


@dataclass(frozen=True)
class _Device:
    """What kernels do with a schedule: the same numbers and functions."""

    schedule: TileSchedule

    def tiles(self) -> Any:
        from tileweave.device.triton.tiles import OwnerTiles, Tiles

        s = self.schedule
        first = (s.rank, s.world_size, s.rows, s.tile_m, s.group_m, s.num_tiles)
        last = (s.team, s.tile_rows, s.tile_cols, s.k_blocks, s.split_tail)
        if isinstance(s, ScatterSchedule):
            return OwnerTiles(*first, min(s.chunk_rows, s.tile_rows), *last)
        return Tiles(*first, s.num_segments, s.band_sources, s.lead, *last)

    def place(self, tiles: Any, tile: int) -> tuple[int, int, int]:
        from tileweave.device.triton import tiles as device

        s = self.schedule
        if isinstance(s, ScatterSchedule):
            return device.place_out(tiles, tile)
        if s.per_node:
            return device.place_in_nodes(tiles, tile, s.per_node, s.chunk_tiles)
        return device.place(tiles, tile)

    def units(self, program: int) -> Iterator[tuple[int, ...]]:
        from tileweave.device.triton import tiles as device

        s, tiles = self.schedule, self.tiles()
        for number in range(s.num_segments):
            first, count = 0, s.num_tiles
            if not isinstance(s, ScatterSchedule):
                first, count = device.segment(tiles, number)
            share = device.share_of(tiles, program, s.num_programs, count)
            for index in range(share.units):
                tile, k_begin, k_end = device.unit_range(share, index)
                place = self.place(tiles, first + tile)
                owner, helpers = device.part_range(share, tile)
                yield first + tile, *place, k_begin, k_end, number, owner, helpers


def _on_host(s: TileSchedule, program: int) -> Iterator[tuple[int, ...]]:
    for unit in s.units(program):
        place = unit.first_row, unit.row_limit, unit.tile_col, unit.k_begin, unit.k_end
        yield unit.tile, *place, unit.segment, unit.owner, unit.helpers


def maps_of_tiles(world: World, rank: int, seed: int) -> Found:
    draw = random.Random(f"maps {rank} {seed}")
    for make in (_of_gather, _over_nodes, _of_scatter):
        for _ in range(EACH):
            schedule = make(draw)
            program = draw.randrange(schedule.num_programs)
            mine = list(_Device(schedule).units(program))
            wanted = list(_on_host(schedule, program))
            yield "units", torch.tensor(mine), torch.tensor(wanted)
    yield from _places_in_experts(draw)


def _places_in_experts(draw: random.Random) -> Found:
    from tileweave.kernels.experts.tiles import Walk, place_in_expert

    for _ in range(EACH):
        begin, rows, cols = draw.randrange(9), draw.randint(1, 100), draw.randint(1, 4)
        tile_m, group, first = 16, draw.randint(1, 4), draw.randrange(5)
        tall = -(-rows // tile_m)
        walk = Walk(0, first, first + tall * cols, begin, begin + rows)
        for number in range(tall * cols):
            row, col = grouped(number, tall, cols, group)
            found = place_in_expert(walk, first + number, cols, tile_m, group)
            yield "place", torch.tensor(found), torch.tensor((begin + row * tile_m, col))


SCENARIOS = (Local("maps of tiles", maps_of_tiles),)
