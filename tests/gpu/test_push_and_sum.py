"""Push and sums of a table gradient in one launch, on one GPU that is its only peer: the bits of
sums after a push.

Half of the samples are its own. The gradients of the others are in the slot, as if a peer had
pushed them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tileweave.transport import protocol

pytestmark = pytest.mark.gpu

BATCH, TABLES, DIM, ROWS = 4096, 13, 128, 50_000
POOLING = (50, 3, 2, *[1] * 10)  # rows per bag of each table
EPOCH = 5


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


class Step:
    """SGD steps of 13 tables in place, by the push that brings the gradient (``push``) or with a
    gradient that is already there."""

    def __init__(self, dtype: torch.dtype) -> None:
        from tileweave.kernels.embedding.gradient import COUNTERS, GROUPS, Push
        from tileweave.kernels.runtime.peers import Peers
        from tileweave.ops.embedding.bag_all_to_all_fused import pieces_of
        from tileweave.ops.embedding.table_gradient import Lookups, sort_lookups
        from tileweave.planning.sharding import EmbeddingLayout

        torch.manual_seed(0)
        gpu = torch.device("cuda")
        self.tables = [torch.randn(ROWS, DIM, device=gpu).to(dtype) for _ in POOLING]
        self.before = [t.clone() for t in self.tables]
        self.grad = torch.randn(BATCH, TABLES * DIM, device=gpu).to(dtype)
        lengths = torch.tensor(POOLING, device=gpu).repeat_interleave(BATCH)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        indices = torch.randint(0, ROWS, (int(offsets[-1]),), device=gpu)
        self.lookups = Lookups(indices, offsets, None, BATCH, False)
        self.ordered = sort_lookups(self.tables, self.lookups, True)
        self.rate = torch.full((1,), 0.1, device=gpu)

        def words(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=gpu)

        def address(of: torch.Tensor) -> torch.Tensor:
            return torch.tensor([of.data_ptr()], device=gpu)

        slots, signals, self.control = torch.zeros_like(self.grad).view(-1), words(64), words(64)
        self.control[protocol.EPOCH] = EPOCH
        for limit in (protocol.TIMEOUT_US, protocol.MEETING_US, protocol.PUSHED_US):
            self.control[limit] = 3_000_000
        peers = Peers(
            slots,
            slots.numel(),
            address(slots),
            address(signals),
            signals,
            self.control,
            words(64),
            words(COUNTERS),
        )
        layout, first = EmbeddingLayout.in_rank_order([[DIM] * TABLES]), BATCH // 2
        pieces, silent = pieces_of(layout, 0, GROUPS.value, own=True)
        self.push = Push(
            peers,
            self.grad[first:],
            pieces.to(gpu),
            silent,
            slots.view_as(self.grad),
            layout.columns[0],
            first,
            16 // dtype.itemsize,
            0,
            1,
            32 * 132,
        )

    def __call__(self, fused: bool) -> None:
        from tileweave.ops.embedding.table_gradient import Update, table_gradients

        grad, push = (self.push.slot, self.push) if fused else (self.grad, None)
        update = Update("sgd", rate=self.rate)
        table_gradients(grad, self.tables, self.lookups, self.ordered, 0.5, update, push=push)

    def result(self, step: Callable[[], None]) -> list[torch.Tensor]:
        """The tables after ``step`` from their initial values. Own rows of the slot are NaN."""
        for table, old in zip(self.tables, self.before, strict=True):
            table.copy_(old)
        self.push.slot.copy_(self.grad)[self.push.first_sample :] = float("nan")
        step()
        torch.cuda.synchronize()
        assert self.control[2] == 0, "a wait ran out of time"
        assert self.push.arrived()[0] == 0, "the next call would not wait"
        return [t.clone() for t in self.tables]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_push_and_sum_gives_the_same_bits(dtype: torch.dtype) -> None:
    step = Step(dtype)
    want = step.result(lambda: step(False))
    for call in range(3):
        got = step.result(lambda: step(True))
        assert all(map(torch.equal, got, want)), f"call {call}"
        assert torch.equal(step.push.slot, step.grad)
        assert step.control[0] == EPOCH + call + 1
    step.push.launch()  # without sums
    torch.cuda.synchronize()
    assert step.control[0] == EPOCH + 4 and step.push.arrived()[0] == 0


def test_push_and_sum_in_a_graph() -> None:
    step = Step(torch.float32)
    want = step.result(lambda: step(False))
    step.result(lambda: step(True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step(True)
    for _ in range(5):
        assert all(map(torch.equal, step.result(graph.replay), want))
