"""Tiles of grouped matmuls: the walk of the device equals that of the host, and every row is paired
with every column once."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from tileweave.planning.combine import MAX_GROUPS, plan_combine
from tileweave.planning.machine import CPU, H200
from tileweave.planning.schedules.grouped import (
    GroupedProblem,
    experts_per_block,
    plan_dispatch,
    routing_cut,
    tickets,
    walk,
)


def offsets_of(seed: int) -> list[int]:
    draw = random.Random(seed)
    offsets = [0]
    for _ in range(draw.randint(1, 9)):
        offsets.append(offsets[-1] + draw.choice((0, 0, 1, 3, 16, 17, 70)))
    return offsets


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_paired_with_every_column_once(seed: int) -> None:
    offsets, cols = offsets_of(seed), 40
    seen: dict[tuple[int, int], int] = {}
    for expert, first, end, col in walk(offsets, cols, 16, 16, 1 + seed % 4):
        assert offsets[expert] <= first < end == offsets[expert + 1]
        for row in range(first, min(first + 16, end)):
            seen[row, col] = seen.get((row, col), 0) + 1
    assert set(seen) == {(row, col) for row in range(offsets[-1]) for col in range(3)}
    assert not seen or set(seen.values()) == {1}


@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize("seed", range(20))
def test_device_walk_equals_the_hosts(seed: int, stride: int) -> None:
    """Programs that take every ``stride``-th tile find the tiles of the host's list, and its
    end."""
    tiles = pytest.importorskip("tileweave.kernels.experts.tiles")
    first_expert, walk_to, place_in_expert = tiles.SOURCES
    offsets, group = offsets_of(seed), 1 + seed % 4
    experts, want = len(offsets) - 1, list(walk(offsets, 40, 16, 16, group))
    with mock.patch.object(tiles, "tl", SimpleNamespace(load=offsets.__getitem__)):
        for program in range(stride):
            at, found = first_expert(0, 3, 16), []
            tile = program
            while True:
                at = walk_to(at, tile, 0, experts, 3, 16)
                if at.expert == experts:
                    break
                row, col = place_in_expert(at, tile, 3, 16, group)
                found.append((at.expert, row, at.end, col))
                tile += stride
            assert found == want[program::stride]


@pytest.mark.parametrize("sends", [1, 3, 6, 7, 21])
@pytest.mark.parametrize("own", [0, 1, 2, 5, 7])
def test_device_tickets_equal_the_hosts(sends: int, own: int) -> None:
    """Each block is one ticket, after those it needs. Own blocks come in order, and both kinds end
    together."""
    device = pytest.importorskip("tileweave.kernels.experts.combine_hopper_tickets")
    count_tickets, place_ticket = device.SOURCES
    for chunks in (1, 2, 3, 4, 7, 31):
        want = tickets(chunks, sends, own)
        for late in (0, 1):
            count = count_tickets(late, chunks, sends, own)
            assert [
                place_ticket(ticket, late, chunks, sends, own) for ticket in range(count)
            ] == want[late]
        order = [*want[0], *want[1]]
        assert [t for t in order if t[0]] == [
            (True, chunk, block) for chunk in range(chunks) for block in range(sends)
        ]
        assert [t for t in order if not t[0]] == [
            (False, chunk, block) for chunk in range(chunks) for block in range(own)
        ]
        assert not [t for t in want[0] if t[1] > chunks - 2 - (not t[0])], (
            "early: for peers but the last chunk, own but two"
        )
        for place, (is_send, chunk, _) in enumerate(want[0]):
            assert is_send or sum(t[0] for t in want[0][:place]) == (chunk + 2) * sends, (
                "after the sends of the next chunk"
            )
        mixed = sends + (own if chunks > 1 else 0)
        assert not [t for t in want[1][:mixed] if not t[0] and t[1] == chunks - 1], (
            "blocks that need all peers come later"
        )
        assert want[1][0][0] and not any(t[0] for t in want[1][mixed:])
        for n in range(mixed):
            assert abs(sum(t[0] for t in want[1][:n]) * mixed - n * sends) < mixed, "even"


@pytest.mark.parametrize(("sends", "own"), [(34755, 11585), (34755, 11586), (10**5, 10**4)])
def test_tickets_of_many_blocks_fit_int32(sends: int, own: int) -> None:
    """Products are below 2^31, and each block is one ticket. (34755, 11585) are the largest counts
    that are mixed."""
    device = pytest.importorskip("tileweave.kernels.experts.combine_hopper_tickets")
    count_tickets, place_ticket = device.SOURCES
    mixed = sends + own
    assert mixed > 46340 or (mixed + 1) * sends < 2**31
    kinds = [0, 0]
    for ticket in range(count_tickets(1, 4, sends, own)):
        is_send, chunk, block = place_ticket(ticket, 1, 4, sends, own)
        assert (chunk, block) == ((3, kinds[1]) if is_send else divmod(2 * own + kinds[0], own))
        kinds[is_send] += 1
    assert kinds == [2 * own, sends]


def test_combine_counters_do_not_overlap() -> None:
    """For any number of chunks and groups."""
    tasks = pytest.importorskip("tileweave.kernels.experts.combine_hopper_tasks")
    own = [
        tasks.WEIGHTS.value,
        tasks.LISTED.value,
        tasks.TICKETS.value,
        tasks.TICKETS.value + tasks.MAX_SLICES.value,
    ]
    tiles = [tasks.TILES.value + chunk for chunk in range(MAX_GROUPS)]
    sent = [
        tasks.SENT.value + peer * tasks.MAX_SLICES.value + word
        for peer in range(8)
        for word in range(MAX_GROUPS)
    ]
    words = [*own, *tiles, *sent]
    assert len(set(words)) == len(words) and max(words) < tasks.COUNTER_WORDS.value


def test_blocks_of_experts() -> None:
    for experts in range(1, 130):
        for blocks in (1, 2, 8, 32):
            size = experts_per_block(experts, blocks)
            assert 1 <= -(-experts // size) <= blocks


def test_sort_units_cover_every_choice_and_are_bounded() -> None:
    for world_size, tokens, topk in ((4, 4096, 8), (8, 16384, 8), (2, 5000, 1), (3, 1031, 5)):
        cut = routing_cut(world_size, tokens, topk)
        assert cut.launches == (1 if world_size * tokens * topk <= 8192 else 2)
        for sms in (1, 3, 132):
            units, unit = (
                cut.units(world_size, tokens, topk, sms),
                cut.block * cut.span(world_size * tokens * topk, sms),
            )
            assert units * unit >= world_size * tokens * (topk + 1)
            assert units <= 2 * (2 * sms + 2 * world_size)
    assert routing_cut(4, 1, 8).launches == 1 == routing_cut(4, 0, 8).launches


def test_dispatch_paths() -> None:
    problem = GroupedProblem(4, 4096, 8, 32, 3072, 4096, 2, "bfloat16")
    assert plan_dispatch(problem, H200, False).path == "fused"
    assert plan_dispatch(problem, CPU, True).path == "fused"
    assert plan_dispatch(problem, CPU, False).path == "unfused"
    for tokens in (1, 8, 32, 128, 1024, 4096, 65536):
        cut = plan_dispatch(
            GroupedProblem(4, tokens, 8, 32, 3072, 4096, 2, "bfloat16"), H200, False
        ).config
        assert cut is not None and cut.signal_blocks <= 32
    # as many rows per expert as tokens per rank
    mixtral = GroupedProblem(4, 4096, 2, 2, 28672, 4096, 2, "bfloat16")
    cuts = [
        plan_dispatch(replace(mixtral, max_tokens=tokens), H200, False).config
        for tokens in (2, 64, 65, 4096)
    ]
    assert [(cut.kernel, cut.ordered) for cut in cuts if cut] == [
        ("triton", False),
        ("hopper", False),
        ("hopper", True),
        ("hopper", True),
    ]
    for odd in (
        GroupedProblem(1, 4096, 8, 32, 3072, 4096, 2, "bfloat16"),
        GroupedProblem(9, 4096, 8, 32, 3072, 4096, 2, "bfloat16"),
        GroupedProblem(4, 0, 8, 32, 3072, 4096, 2, "bfloat16"),
        GroupedProblem(4, 4096, 8, 32, 3072, 4095, 2, "bfloat16"),
        GroupedProblem(4, 4096, 8, 32, 3072, 4096, 4, "float32"),
    ):
        assert plan_dispatch(odd, H200, False).path == "unfused"


@pytest.mark.parametrize(
    ("hidden", "width", "experts", "tokens", "kernels"),
    [
        (4096, 1536, 64, 1, ("triton", "triton")),
        (4096, 1536, 64, 8, ("triton", "triton")),
        (4096, 1536, 64, 32, ("hopper", "triton")),
        (7168, 2048, 128, 1, ("triton", "triton")),
        (7168, 2048, 128, 8, ("hopper", "hopper")),
        (7168, 2048, 128, 32, ("hopper", "hopper")),
    ],
)
def test_fp8_layers_decode_by_what_was_faster(
    hidden: int, width: int, experts: int, tokens: int, kernels: tuple[str, str]
) -> None:
    """The faster of two measured ways (Qwen3-235B, DeepSeek-V3); 8 tokens of the former are
    level."""
    up = GroupedProblem(2, tokens, 8, experts, 2 * width, hidden, 1, "float8_e4m3fn")
    down = replace(up, cols=hidden, depth=width)
    found = (plan_dispatch(up, H200, False).config, plan_combine(down, H200, False).config)
    assert tuple(config.kernel for config in found if config) == kernels
