"""nn.MoE in CPU worlds, against the whole layer on one device."""

from __future__ import annotations

from tests.support import moe_layer as moe
from tests.support.moe_layer import Layer
from tests.support.worlds import Worlds


def test_layer(worlds: Worlds) -> None:
    layers = [Layer((5,), shared=8), Layer((3, 0, 4), topk=3, normalize=False)]
    worlds("gloo", 3).run(moe.layer_over_ranks, layers)


def test_layer_on_one_rank(worlds: Worlds) -> None:
    worlds("gloo", 1).run(moe.layer_over_ranks, [Layer((6,), shared=4)])


def test_layer_in_half_precision(worlds: Worlds) -> None:
    worlds("gloo", 2).run(moe.layer_over_ranks, [Layer((6,), dtype="bfloat16")])


def test_layer_compiled(worlds: Worlds) -> None:
    worlds("gloo", 2).run(moe.layer_over_ranks, [Layer((4,))], "aot_eager", timeout=100)
