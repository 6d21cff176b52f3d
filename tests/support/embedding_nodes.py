"""Shared by CPU and GPU tests: embedding_bag_all_to_all where ranks are on several nodes."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

from tests.support import embedding, embedding_backward
from tests.support.embedding import Case
from tests.support.worlds import Member

from tileweave.ops.embedding import over_nodes

CASES = [
    Case(((3, 8), (16,), ()), 13, weighted=True),
    Case(((8, 4, 4), (4, 4)), 12, longest=3, mode="mean", stray=True),
    Case(((8, 8),), 7, longest=2, out_dtype="bfloat16", shuffled=True),
    Case(((8,),), 2),  # some ranks have no samples
]


def in_slices(me: Member, cases: list[Case], check, *more: object) -> None:
    """``check`` of cases whose vectors cross in as many slices as a rank has tables."""
    with mock.patch.object(over_nodes, "LEAST_BYTES", 1):
        check(me, cases, *more)


def on_gpu(me: Member) -> None:
    """Small and larger calls, in one slice and in several, and gradients."""
    large = Case(((64, 128), (256,)), 700, longest=8, rows=999, dtype="bfloat16", shuffled=True)
    small = [*CASES[:2], replace(large, batch=45, rows=50)]
    embedding.public_calls(me, small, "fused")
    in_slices(me, small, embedding.public_calls, "fused")
    embedding_backward.gradients(me, small[:2])
