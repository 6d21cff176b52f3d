"""A fused DLRM step by phases, compared with two unfused ones; ``dlrm.py --time`` prints it.

========  ====================================================================================
fused     lookups that store to the owners of samples; gradients pushed to the owners of
          tables, sums, step in place
unfused   the same lookups, sums and step, with NCCL all-to-alls and one copy into or out of
          columns between them
torch     a call of ``embedding_bag`` per table, sparse gradients, ``torch.optim.SGD``, NCCL
          all-to-alls
========  ====================================================================================

All else is the same code for all three, except that torch's SGD step cannot be captured. MLPs,
interaction and backward are replayed from CUDA graphs, in TF32. Work that does not depend on the
tables of this batch runs concurrently on a second stream:

    main  | lookup,            | interaction,          | to owners of tables,
          | to owners of       | top MLP,              | sums, step of the tables
          | samples            | backward              |
    side  |                    | ids of batch n + 1,   | backward of the bottom MLP, all-reduce,
          |                    | lengths of batch      | step of the MLPs,
          |                    | n + 2; sort           | bottom MLP of batch n + 1

The host waits only for lengths that arrived a step before, so it is a step ahead of the device.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from dlrm import RATE, Batch, Step, draw, towers_from_seed
from dlrm_layers import last_layer, relu_backward
from dlrm_rivals import (
    BOTH,
    BOTH_BACK,
    LOOKUP,
    SUMS,
    TO_SAMPLES,
    TO_TABLES,
    Fused,
    Phase,
    Torch,
    Unfused,
    quiet,
)
from interaction import interaction
from torch.nn.functional import linear

import tileweave as tw
from tileweave.bench.subjects import worst_of
from tileweave.launcher import Member
from tileweave.nn import ShardedEmbeddingBag
from tileweave.ops.core.collectives import all_gather, all_reduce

WHOLE = "whole step"
PHASES = (
    LOOKUP,
    TO_SAMPLES,
    BOTH,
    "interaction, top MLP, backward",
    TO_TABLES,
    SUMS,
    BOTH_BACK,
    "backward of bottom MLP",
    "all-reduce, MLPs' step",
    "ids to owners, sort",
    "bottom MLP",
    WHOLE,
)
LOSS_ERROR = 1e-3


# --- The step ---


class Replayed:
    """A function of tensors at fixed addresses, replayed from a CUDA graph; on the CPU it is
    called.

    priority : its kernels start before those of other streams. A graph keeps the priority of its
        capture, but memsets and copies in it have none: they wait until a concurrent kernel has no
        program left to start (decision 0034). So do not use this for functions with large ones,
        such as a sort.
    """

    def __init__(
        self, function: Callable[[], Any], device: torch.device, priority: bool = False
    ) -> None:
        self.function, self.graph = function, None
        if device.type == "cuda":
            side = torch.cuda.Stream(device, priority=-int(priority))
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    function()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=side, capture_error_mode="thread_local"):
                self.result = function()
        else:
            self.result = function()

    def __call__(self) -> Any:
        if self.graph is None:
            self.result = self.function()
        else:
            self.graph.replay()
        return self.result


class SideStream:
    """A second stream with a higher priority than the first; on the CPU everything is done in
    order."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def __call__(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """Queue the work inside on the second stream, after the event."""
        if self.stream is not None and after is not None:
            self.stream.wait_event(after)
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def record(self) -> torch.cuda.Event | None:
        """An event for the work queued on the current stream until now."""
        return None if self.stream is None else torch.cuda.current_stream().record_event()

    def join(self, event: torch.cuda.Event | None, *tensors: torch.Tensor) -> None:
        """Make the first stream wait for the event; it will read ``tensors`` of the second."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            for t in tensors:
                t.record_stream(torch.cuda.current_stream())


class PipelinedStep:
    """Training steps on one rank, each of which also prepares the next batches. ``phase`` is called
    where each phase begins."""

    def __init__(
        self,
        member: Member,
        tables: ShardedEmbeddingBag,
        kind: type[Any],
        hidden: int,
        batch: Batch,
    ) -> None:
        self.member, self.features, self.side = member, tables.features, SideStream(member.device)
        dim, on_gpu = tables.plan.tables[0].dim, member.device.type == "cuda"
        self.towers = towers_from_seed(dim, hidden).to(member.device)
        self.dense, self.labels = torch.empty_like(batch[0]), torch.empty_like(batch[1])
        self.exchange = kind(tables, batch[0].shape[0] * member.world_size)
        indices, offsets, _ = tw.distribute_indices(batch[2], batch[3], self.features)
        # so that the result exists before the captures
        self.exchange.lookup(indices, offsets, self.exchange.arriving(offsets), quiet)
        member.barrier()
        self.bottom = Replayed(self._bottom, member.device, priority=True)
        self.middle = Replayed(self._middle, member.device)
        self.backward = Replayed(self._backward, member.device, priority=True)
        self.descend = (
            Replayed(self._descend, member.device, priority=True) if on_gpu else self._descend
        )
        # the warm-up before the captures changed the parameters
        self.towers.load_state_dict(towers_from_seed(dim, hidden).state_dict())
        member.barrier()
        self.look = self.update = self.ordered = self.reduced = None
        if kind.captured:
            self._capture(indices, offsets)
        member.barrier()

    def _capture(self, indices: torch.Tensor, offsets: torch.Tensor) -> None:
        """Capture lookup and update as graphs of ids and of an order at fixed addresses."""
        device = self.member.device
        # room for batches with more ids
        self.ids, self.ends = indices.new_zeros(indices.numel() * 9 // 8 + 512), offsets.clone()
        self.ordered = self.exchange.sort(self.ids, self.ends)
        self.middle.result[2].zero_()  # so that tables do not change
        self.look = Replayed(lambda: self.exchange.lookup(self.ids, self.ends, None, quiet), device)
        self.update = Replayed(
            lambda: self.exchange.update(self.middle.result[2], self.ordered, quiet), device
        )

    @torch.no_grad()
    def _bottom(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs of both layers of the bottom MLP."""
        first, second = self.towers.bottom[0], self.towers.bottom[2]
        y = linear(self.dense, first.weight, first.bias).relu_()
        return y, linear(y, second.weight, second.bias).relu_()

    def _middle(self) -> tuple[torch.Tensor, ...]:
        """(loss, gradients of the output of the bottom MLP, of pooled vectors, and of the
        parameters of the top MLP)"""
        first, last = self.towers.top[0], self.towers.top[2]
        leaves = [
            t.detach().requires_grad_()
            for t in (self.bottom.result[1], self.exchange.pooled, first.weight)
        ]
        z = linear(interaction(*leaves[:2]), leaves[2])
        loss, gz, *others = last_layer(
            z.detach(), first.bias.detach(), last, self.labels, z.is_cuda
        )
        x, pooled, weight = torch.autograd.grad(z, leaves, gz)
        return loss, x, pooled, weight, *others

    @torch.no_grad()
    def _backward(self) -> torch.Tensor:
        """The gradients of the parameters of both MLPs, as one flat tensor."""
        (y, x), (_, gx, _, *top) = self.bottom.result, self.middle.result
        g, of_second = relu_backward(gx, x, x.is_cuda)
        weight = g.T @ y
        g, of_first = relu_backward(g @ self.towers.bottom[2].weight, y, x.is_cuda)
        return torch.cat(
            [t.reshape(-1) for t in (g.T @ self.dense, of_first, weight, of_second, *top)]
        )

    @torch.no_grad()
    def _descend(self) -> None:
        """The SGD step of the MLPs with the mean of gradients over ranks."""
        parameters = [*self.towers.bottom.parameters(), *self.towers.top.parameters()]
        flat = self.backward.result.split([p.numel() for p in parameters])
        grads = [g.view_as(p) for g, p in zip(flat, parameters, strict=True)]
        torch._foreach_add_(parameters, grads, alpha=-RATE / self.member.world_size)

    def prepare(self, batches: list[Batch]) -> None:
        """Prepare the first two batches as each step prepares its next two."""
        self.coming: deque = deque()
        for batch in batches:
            self.begin(batch)
        self.finish()
        self.sort()
        self.multiply(batches[0], quiet)
        self.store_order(None)

    def begin(self, batch: Batch, after: torch.cuda.Event | None = None) -> None:
        """Send the lengths of a batch to the owners of the tables, on the second stream."""
        with self.side(after):
            pending = tw.begin_distribute_indices(batch[2], batch[3], self.features)
            self.coming.append((pending, self.exchange.arriving(pending.offsets)))

    def finish(self, after: torch.cuda.Event | None = None) -> None:
        """Send the ids of the oldest batch whose lengths were sent, on the second stream. The host
        waits for those lengths."""
        with self.side(after):
            pending, known = self.coming.popleft()
            indices, offsets, _ = pending.finish()
            if self.look is not None:
                count = indices.numel()
                assert count <= self.ids.numel(), (
                    f"{count} ids and room for {self.ids.numel()}: begin with a larger batch"
                )
                self.ids[:count].copy_(indices)  # the rest of self.ids is in no bag
                self.ends.copy_(offsets)
            self.ahead = indices, offsets, known

    def sort(self) -> None:
        """Sort the ids that came last by table row, on the second stream. Steps wait for what was
        queued there before."""
        with self.side(None):
            self.exchanged = self.side.record()
            self.sorted = self.exchange.sort(*self.ahead[:2])

    def store_order(self, after: torch.cuda.Event | None) -> None:
        """Copy the sorted order to where the update reads it, on the second stream and after the
        last update."""
        if self.ordered is not None:
            with self.side(after):
                fixed, count = self.ordered, self.sorted.keys.numel()
                fixed.keys[:count].copy_(self.sorted.keys)
                fixed.bags[:count].copy_(self.sorted.bags)
                fixed.keys[count:].fill_(fixed.first[-1])  # no row

    def multiply(self, batch: Batch, phase: Phase) -> None:
        """Run the bottom MLP on a batch, on the second stream."""
        with self.side(None):
            phase("bottom MLP")
            self.dense.copy_(batch[0])
            self.labels.copy_(batch[1])
            self.bottom()
            self.multiplied = self.side.record()

    def __call__(self, following: Batch, third: Batch, phase: Phase = quiet) -> torch.Tensor:
        """Train on the batch that was prepared last, and prepare ``following`` and ``third``.
        Returns the loss."""
        indices, offsets, known = self.ahead
        self.side.join(self.exchanged, indices, offsets)
        self.side.join(self.reduced)
        if self.look is not None and phase is quiet:
            self.look()
        else:
            self.exchange.lookup(indices, offsets, known, phase)
        looked = self.side.record()
        phase("interaction, top MLP, backward")
        self.side.join(self.multiplied)
        loss, _, grad = self.middle()[:3]
        loss = loss.clone()
        back = self.side.record()
        phase("ids to owners, sort")
        self.finish(looked)  # ids change only after the lookup
        self.begin(third)
        self.sort()
        self.side.join(self.exchanged)  # and so for the order of this batch, queued before
        if self.update is not None and phase is quiet:
            self.update()
        else:
            self.exchange.update(grad, self.ordered, phase)
        done = self.side.record()
        with self.side(back):
            phase("backward of bottom MLP")
            flat = self.backward()
            phase("all-reduce, MLPs' step")
            # This runs concurrently with the update, although both wait for peers. An update waits
            # only for the lowest programs of its launch on every rank, and for copy engines. NCCL's
            # few blocks leave room for those programs, whichever of the two starts first.
            flat.copy_(all_reduce(flat, dist.group.WORLD))
            self.reduced = self.side.record()
            self.descend()
        self.multiply(following, phase)
        self.store_order(done)
        phase("")
        return loss


# --- Time ---


def losses_of(
    member: Member, steps: dict[str, PipelinedStep], plain: Step, batches: list[Batch]
) -> dict[str, list[float]]:
    """Losses of three steps of each kind and of the plain step, from the same weights, on every
    rank. They must be equal."""
    weights = plain.tables.weights()
    before = [w.detach().clone() for w in weights]
    found = {}
    for name, step in (("plain", plain), *steps.items()):
        if name == "plain":
            losses = [plain(batches[i % 2]) for i in range(3)]
        else:
            step.prepare(batches)  # type: ignore[union-attr]
            losses = [step(batches[(i + 1) % 2], batches[i % 2]) for i in range(3)]  # type: ignore[call-arg]
        member.barrier()
        found[name] = all_gather(torch.stack(losses), member.group).tolist()
        for weight, old in zip(weights, before, strict=True):
            weight.detach().copy_(old)
        member.barrier()
    return found


def timed(member: Member, samples: int, rows: int, dim: int, hidden: int) -> dict[str, Any]:
    """Milliseconds of each phase and of a step on rank 0, medians over repeats, with the three
    steps in turn; and their losses."""
    torch.set_float32_matmul_precision("high")
    batches = [draw(number, member.rank, samples, rows, 2, member.device) for number in range(2)]
    plain = Step(member, rows, dim, hidden)
    kinds = {"fused": Fused, "unfused": Unfused, "torch": Torch}
    before = [w.detach().clone() for w in plain.tables.weights()]
    steps = {
        name: PipelinedStep(member, plain.tables, kind, hidden, batches[0])
        for name, kind in kinds.items()
    }
    assert all(
        torch.equal(w, old) for w, old in zip(plain.tables.weights(), before, strict=True)
    ), "making steps must not change tables"
    losses = losses_of(member, steps, plain, batches)
    repeats, calls = (9, 16) if member.device.type == "cuda" else (1, 2)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            clock = PhaseClock(member, found[name])
            step.prepare(batches)
            step(batches[1], batches[0], clock)
            member.barrier()
            begin = time.perf_counter()
            for i in range(calls):
                step(batches[i % 2], batches[(i + 1) % 2])
            member.barrier()
            found[name].setdefault(WHOLE, []).append((time.perf_counter() - begin) * 1e3 / calls)
    tw.close()
    times = {
        name: {k: sorted(v)[len(v) // 2] for k, v in phases.items()}
        for name, phases in found.items()
    }
    return {
        "ms": times,
        "losses": losses,
        "samples": samples * member.world_size,
        "rows": rows,
        "dim": dim,
        "hidden": hidden,
    }


class PhaseClock:
    """Times phases. They begin together on all ranks and none runs concurrently with another, so
    their sum is far above a whole step."""

    def __init__(self, member: Member, found: dict[str, list[float]]) -> None:
        self.member, self.found, self.label, self.begin = member, found, "", 0.0

    def __call__(self, label: str) -> None:
        self.member.synchronize()
        if self.label:
            self.found.setdefault(self.label, []).append((time.perf_counter() - self.begin) * 1e3)
        self.member.barrier()
        self.label, self.begin = label, time.perf_counter()


def report(found: dict[str, Any]) -> bool:
    """Print the table. Returns whether losses are equal."""
    times, losses = found["ms"], found["losses"]
    print(f"{'ms':46}" + "".join(f"{name:>10}" for name in times))
    for label in PHASES:
        cells = (f"{of[label]:10.3f}" if label in of else f"{'-':>10}" for of in times.values())
        print(f"{label:46}" + "".join(cells))
    fused, unfused = times["fused"], times["unfused"]
    for name in ("unfused", "torch"):
        print(f"the {name} step takes {times[name][WHOLE] / fused[WHOLE]:.2f} times as long")
    exchange = max(fused[BOTH] - unfused[LOOKUP], 0.0) + max(fused[BOTH_BACK] - unfused[SUMS], 0.0)
    if exchange < fused[WHOLE]:
        bound = unfused[WHOLE] / (fused[WHOLE] - exchange)
        print(
            f"the fused step waits {exchange:.2f} ms for its exchanges; "
            f"if they were free, the unfused step would take {bound:.2f} times as long"
        )
    error = worst_of(
        abs(a - b) / abs(a)
        for name in losses
        for a, b in zip(losses["plain"], losses[name], strict=True)
    )
    print(
        f"losses of three steps differ by {error:.1e} from those of the plain step"
        + ("" if error < LOSS_ERROR else ": WRONG")
    )
    return error < LOSS_ERROR
