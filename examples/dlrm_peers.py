"""A DLRM step by phases, beside two that are not fused; ``dlrm.py --time`` prints it.

========  ===================================================================================================
fused     lookups with stores to the samples' owners; gradients pushed to the tables' owners, sums, step in place
unfused   the same lookups, sums and step, but NCCL all-to-alls and one copy into or out of columns between
torch     a call of ``embedding_bag`` for each table, sparse gradients, ``torch.optim.SGD``, NCCL all-to-alls
========  ===================================================================================================

All else is the same code for all three. MLPs and interaction are replayed from CUDA graphs, in TF32; what is not data of this
batch's tables runs beside, on a second stream:

    main   | lookup | to samples' owners | interaction, top MLP, backward | to tables' owners | sums, step of the tables
    beside |                             | ids of the next batch to owners | sort             | (2)
    (2): bottom MLP's backward, all-reduce, MLPs' step, bottom MLP of the next batch

Ids go early, since the host waits for how many will come: it then queues the rest of the step while the interaction runs.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from dlrm import RATE, Batch, Step, draw, towers_from_seed
from torch import nn

import tileweave as tw
from tileweave.launcher import Member
from tileweave.nn import ShardedEmbeddingBag
from tileweave.ops.reference import all_reduce, all_to_all_whole
from tileweave.ops.table_gradient import Lookups, sort_beside, table_gradients
from tileweave.sharding import EmbeddingLayout, rows_of

LOOKUP, TO_SAMPLES, TO_TABLES, SUMS = "lookup", "to samples' owners", "to tables' owners", "sums, step of tables"
BOTH, BOTH_BACK, WHOLE = f"{LOOKUP}, {TO_SAMPLES}", f"{TO_TABLES}, {SUMS}", "whole step"
PHASES = (
    LOOKUP, TO_SAMPLES, BOTH, "interaction, top MLP, backward", TO_TABLES, SUMS, BOTH_BACK, "backward of bottom MLP",
    "all-reduce, MLPs' step", "ids to owners", "bottom MLP", WHOLE,
)  # fmt: skip
LOSS_ERROR = 1e-3
Phase = Callable[[str], object]


# --- The three ways between tables and samples ---


class Fused:
    """The operator; its result stands in one region of symmetric memory, since graphs have frozen where it is."""

    def __init__(self, module: ShardedEmbeddingBag, batch: int) -> None:
        self.module, self.batch, self.numbers = module, batch, module.layout.flat()
        self.tables = [w.detach() for w in module.weights()]
        self.pooled: Any = None

    def arrived(self, offsets: torch.Tensor) -> None:
        """What the host has to know of ids before it looks them up: nothing."""

    @torch.no_grad()
    def lookup(self, indices: torch.Tensor, offsets: torch.Tensor, phase: Phase) -> None:
        phase(BOTH)
        m = self.module
        y = tw.embedding_bag_all_to_all(
            self.tables, indices, offsets, batch=self.batch, layout=m.layout, out_dtype=m.out_dtype, group=m.group_name,
            out=self.pooled,
        )  # fmt: skip
        self.pooled = y if self.pooled is None else self.pooled

    def update(self, grad: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, phase: Phase) -> None:
        phase(BOTH_BACK)
        optimizer = self.module.optimizer
        torch.ops.tileweave.embedding_bag_all_to_all_step(  # what backward calls
            grad, self.tables, [], indices, offsets, None, self.numbers, self.batch, False, self.module.group_name, "sgd", True,
            optimizer.rate, optimizer.epsilon, False,
        )  # fmt: skip


class Unfused:
    """Our lookup, an exchange; backward an exchange beside the sort, our sums and step in place."""

    def __init__(self, module: ShardedEmbeddingBag, batch: int) -> None:
        self.module, self.batch, self.layout, self.rank = module, batch, module.layout, module.rank
        self.tables = [w.detach() for w in module.weights()]
        begin, end = rows_of(batch, module.world_size, module.rank)
        self.pooled = torch.empty(end - begin, self.layout.width, device=self.tables[0].device)

    def arrived(self, offsets: torch.Tensor) -> None:
        """What the host has to know of ids before it looks them up: nothing."""

    @torch.no_grad()
    def lookup(self, indices: torch.Tensor, offsets: torch.Tensor, phase: Phase) -> None:
        phase(LOOKUP)
        y = tw.embedding_bag(self.tables, indices, offsets)
        phase(TO_SAMPLES)
        to_samples(y, self.layout, self.rank, self.pooled)

    def update(self, grad: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, phase: Phase) -> None:
        phase(TO_TABLES)
        lookups, size = Lookups(indices, offsets, None, self.batch, False), self.module.world_size
        ordered = sort_beside(self.tables, lookups, grad.is_cuda)
        mine = to_tables(grad, self.layout, self.rank, self.batch)
        phase(SUMS)
        rate = self.module.optimizer.rate
        table_gradients(mine, self.tables, lookups, ordered, 1.0 / size, "sgd", (), rate, 0.0, grad.is_cuda)


class Torch:
    """Torch alone: a call of ``embedding_bag`` for each table, sparse gradients, its SGD."""

    def __init__(self, module: ShardedEmbeddingBag, batch: int) -> None:
        self.batch, self.layout, self.rank = batch, module.layout, module.rank
        self.weights = module.weights()
        self.optimizer = torch.optim.SGD(self.weights, lr=RATE / module.world_size)
        begin, end = rows_of(batch, module.world_size, module.rank)
        self.pooled = torch.empty(end - begin, self.layout.width, device=self.weights[0].device)

    def arrived(self, offsets: torch.Tensor) -> None:
        """Where each table's ids end."""
        self.cuts = offsets[:: self.batch].tolist()

    def lookup(self, indices: torch.Tensor, offsets: torch.Tensor, phase: Phase) -> None:
        phase(LOOKUP)
        cuts, bags = self.cuts, []
        for number, weight in enumerate(self.weights):
            begins = offsets[number * self.batch : (number + 1) * self.batch + 1] - cuts[number]
            rows = indices[cuts[number] : cuts[number + 1]]
            bags.append(nn.functional.embedding_bag(rows, weight, begins, mode="sum", sparse=True, include_last_offset=True))
        self.bags = torch.cat(bags, 1)
        phase(TO_SAMPLES)
        to_samples(self.bags.detach(), self.layout, self.rank, self.pooled)

    def update(self, grad: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, phase: Phase) -> None:
        phase(TO_TABLES)
        mine = to_tables(grad, self.layout, self.rank, self.batch)
        phase(SUMS)
        self.bags.backward(mine)
        self.optimizer.step()
        self.optimizer.zero_grad()


def to_samples(pooled: torch.Tensor, layout: EmbeddingLayout, rank: int, out: torch.Tensor) -> None:
    """Pooled vectors [B, own columns] to their samples' owners: an all-to-all, and one copy into columns of ``out``."""
    (batch, width), size = pooled.shape, len(layout.dims)
    shares = [end - begin for begin, end in (rows_of(batch, size, r) for r in range(size))]
    sizes = [shares[rank] * sum(dims) for dims in layout.dims]
    got = all_to_all_whole(pooled.view(-1), [n * width for n in shares], sizes, dist.group.WORLD).split(sizes)
    placed = []
    for block, columns, dims in zip(got, layout.columns, layout.dims, strict=True):
        placed += zip(columns, block.view(shares[rank], sum(dims)).split(list(dims), 1), strict=True)
    torch.cat([part for _, part in sorted(placed, key=lambda pair: pair[0])], 1, out=out)


def to_tables(grad: torch.Tensor, layout: EmbeddingLayout, rank: int, batch: int) -> torch.Tensor:
    """The other way: [b, width] to [B, own columns]; one copy out of columns, an all-to-all, which lands in place."""
    samples, size = grad.shape[0], len(layout.dims)
    split = [samples * sum(dims) for dims in layout.dims]
    flat = grad.new_empty(sum(split))
    for piece, columns, dims in zip(flat.split(split), layout.columns, layout.dims, strict=True):
        if dims:
            parts = [grad[:, c : c + d] for c, d in zip(columns, dims, strict=True)]
            torch.cat(parts, 1, out=piece.view(samples, sum(dims)))
    width = sum(layout.dims[rank])
    sizes = [(end - begin) * width for begin, end in (rows_of(batch, size, r) for r in range(size))]
    return all_to_all_whole(flat, split, sizes, dist.group.WORLD).view(batch, width)


# --- The step ---


class Replayed:
    """A function of tensors that stay where they are, replayed from a CUDA graph; on the CPU called as it stands."""

    def __init__(self, function: Callable[[], Any], device: torch.device) -> None:
        self.function, self.graph = function, None
        if device.type == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    function()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.result = function()
        else:
            self.result = function()

    def __call__(self) -> Any:
        if self.graph is None:
            self.result = self.function()
        else:
            self.graph.replay()
        return self.result


class Beside:
    """A second stream, whose kernels go before those that wait on the first; on the CPU one thing after the other."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def __call__(self, behind: torch.cuda.Event | None) -> Iterator[None]:
        """What is queued inside runs on the second stream, behind the event."""
        if self.stream is not None and behind is not None:
            self.stream.wait_event(behind)
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """What the current stream has been given until now."""
        return None if self.stream is None else torch.cuda.current_stream().record_event()

    def join(self, event: torch.cuda.Event | None, *tensors: torch.Tensor) -> None:
        """The first stream goes on behind the event, and will read ``tensors`` of the second."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
            for t in tensors:
                t.record_stream(torch.cuda.current_stream())


class PipelinedStep:
    """Training steps on one rank, each beside what the next batch needs; ``phase`` is told where each part begins."""

    def __init__(
        self, member: Member, tables: ShardedEmbeddingBag, kind: type[Fused | Unfused | Torch], hidden: int, batch: Batch
    ) -> None:
        self.member, self.features, self.beside = member, tables.features, Beside(member.device)
        dense, labels, lengths, values = batch
        dim = tables.plan.tables[0].dim
        self.towers = towers_from_seed(dim, hidden).to(member.device)
        self.dense, self.labels = torch.empty_like(dense), torch.empty_like(labels)
        self.x = torch.empty(dense.shape[0], dim, device=member.device)
        self.exchange = kind(tables, dense.shape[0] * member.world_size)
        indices, offsets, _ = tw.distribute_indices(lengths, values, self.features)
        self.exchange.arrived(offsets)
        self.exchange.lookup(indices, offsets, lambda name: None)  # so that the result has a place
        member.barrier()
        self.middle = Replayed(self._middle, member.device)
        self.backward = Replayed(self._backward, member.device)
        self.descend = Replayed(self._descend, member.device) if member.device.type == "cuda" else self._descend
        self.bottom = Replayed(self._bottom, member.device)
        self.towers.load_state_dict(towers_from_seed(dim, hidden).state_dict())  # warming up took steps
        member.barrier()
        self.prepare(batch)

    @torch.no_grad()
    def _bottom(self) -> None:
        self.x.copy_(self.towers.bottom(self.dense))

    def _middle(self) -> tuple[torch.Tensor, ...]:
        """(loss, gradients of x, of pooled, of the top MLP's parameters)"""
        leaves = [self.x.detach().requires_grad_(), self.exchange.pooled.detach().requires_grad_()]
        loss = nn.functional.binary_cross_entropy_with_logits(self.towers(*leaves), self.labels)
        return loss.detach(), *torch.autograd.grad(loss, [*leaves, *self.towers.top.parameters()])

    def _backward(self) -> torch.Tensor:
        """Gradients of all MLPs' parameters, flat; the bottom MLP is multiplied again, which keeps graphs apart."""
        y = self.towers.bottom(self.dense)
        grads = [*torch.autograd.grad(y, self.towers.bottom.parameters(), self.middle.result[1]), *self.middle.result[3:]]
        return torch.cat([g.view(-1) for g in grads])

    @torch.no_grad()
    def _descend(self) -> None:
        """SGD with the mean over ranks."""
        parameters = [*self.towers.bottom.parameters(), *self.towers.top.parameters()]
        flat = self.backward.result.split([p.numel() for p in parameters])
        grads = [g.view_as(p) for g, p in zip(flat, parameters, strict=True)]
        torch._foreach_add_(parameters, grads, alpha=-RATE / self.member.world_size)

    def prepare(self, batch: Batch) -> None:
        """Make the first batch ready; each step makes the next one ready."""
        self.distribute(batch, lambda name: None)
        self.multiply(batch, lambda name: None)

    def distribute(self, batch: Batch, phase: Phase) -> None:
        """Ids of a batch to the tables' owners, on the second stream."""
        with self.beside(None):
            phase("ids to owners")
            indices, offsets, _ = tw.distribute_indices(batch[2], batch[3], self.features)
            self.exchange.arrived(offsets)
            self.ahead = indices, offsets, self.beside.mark()

    def multiply(self, batch: Batch, phase: Phase) -> None:
        """The bottom MLP of a batch, on the second stream."""
        with self.beside(None):
            phase("bottom MLP")
            self.dense.copy_(batch[0])
            self.labels.copy_(batch[1])
            self.bottom()
            self.multiplied = self.beside.mark()

    def __call__(self, following: Batch, phase: Phase = lambda name: None) -> torch.Tensor:
        """The loss of the batch that was made ready last; ``following`` is made ready beside."""
        indices, offsets, arrived = self.ahead
        self.beside.join(arrived, indices, offsets)
        self.exchange.lookup(indices, offsets, phase)
        phase("interaction, top MLP, backward")
        self.beside.join(self.multiplied)
        loss, _, grad = self.middle()[:3]
        loss = loss.clone()
        back = self.beside.mark()
        self.distribute(following, phase)
        self.exchange.update(grad, indices, offsets, phase)
        with self.beside(back):
            phase("backward of bottom MLP")
            flat = self.backward()
            phase("all-reduce, MLPs' step")
            flat.copy_(all_reduce(flat, dist.group.WORLD))
            self.descend()
        self.multiply(following, phase)
        phase("")
        return loss


# --- Time ---


def losses_of(member: Member, steps: dict[str, PipelinedStep], plain: Step, batches: list[Batch]) -> dict[str, list[float]]:
    """Three steps of each from the same weights, and of the plain step; all have to lose alike."""
    weights = plain.tables.weights()
    before = [w.detach().clone() for w in weights]
    found = {}
    for name, step in (("plain", plain), *steps.items()):
        if name == "plain":
            losses = [plain(batches[i % 2]) for i in range(3)]
        else:
            losses = [step(batches[(i + 1) % 2]) for i in range(3)]  # type: ignore[operator]
        member.barrier()
        found[name] = torch.stack(losses).tolist()
        for weight, old in zip(weights, before, strict=True):
            weight.detach().copy_(old)
        member.barrier()
    return found


def timed(member: Member, samples: int, rows: int, dim: int, hidden: int) -> dict[str, Any]:
    """Milliseconds of each phase and of a step, on rank 0, medians over repeats, the three steps in turn; and their losses."""
    torch.set_float32_matmul_precision("high")
    batches = [draw(number, member.rank, samples, rows, 2, member.device) for number in range(2)]
    plain = Step(member, rows, dim, hidden)
    kinds = {"fused": Fused, "unfused": Unfused, "torch": Torch}
    before = [w.detach().clone() for w in plain.tables.weights()]
    steps = {name: PipelinedStep(member, plain.tables, kind, hidden, batches[0]) for name, kind in kinds.items()}
    assert all(torch.equal(w, old) for w, old in zip(plain.tables.weights(), before, strict=True)), "making steps takes none"
    losses = losses_of(member, steps, plain, batches)
    repeats, calls = (9, 16) if member.device.type == "cuda" else (1, 2)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            clock = PhaseClock(member, found[name])
            step.prepare(batches[0])
            step(batches[1], clock)
            member.barrier()
            begin = time.perf_counter()
            for i in range(calls):
                step(batches[i % 2])
            member.barrier()
            found[name].setdefault(WHOLE, []).append((time.perf_counter() - begin) * 1e3 / calls)
    tw.close()
    times = {name: {k: sorted(v)[len(v) // 2] for k, v in phases.items()} for name, phases in found.items()}
    return {"ms": times, "losses": losses, "samples": samples * member.world_size, "rows": rows, "dim": dim, "hidden": hidden}


class PhaseClock:
    """Phases begin together on all ranks and none runs beside another, so their sum is far above a whole step."""

    def __init__(self, member: Member, found: dict[str, list[float]]) -> None:
        self.member, self.found, self.label, self.begin = member, found, "", 0.0

    def __call__(self, label: str) -> None:
        self.member.synchronize()
        if self.label:
            self.found.setdefault(self.label, []).append((time.perf_counter() - self.begin) * 1e3)
        self.member.barrier()
        self.label, self.begin = label, time.perf_counter()


def report(found: dict[str, Any]) -> bool:
    """Print the table; whether all lost alike."""
    times, losses = found["ms"], found["losses"]
    print(f"{'ms':46}" + "".join(f"{name:>10}" for name in times))
    for label in PHASES:
        print(f"{label:46}" + "".join(f"{of[label]:10.3f}" if label in of else f"{'-':>10}" for of in times.values()))
    fused, unfused = times["fused"], times["unfused"]
    for name in ("unfused", "torch"):
        print(f"the {name} step takes {times[name][WHOLE] / fused[WHOLE]:.2f} times as long")
    exchange = max(fused[BOTH] - unfused[LOOKUP], 0.0) + max(fused[BOTH_BACK] - unfused[SUMS], 0.0)
    if exchange < fused[WHOLE]:
        bound = unfused[WHOLE] / (fused[WHOLE] - exchange)
        print(f"the fused step waits {exchange:.2f} ms for its exchanges; were they free, that would be {bound:.2f}")
    worst = max(abs(a - b) / abs(a) for name in losses for a, b in zip(losses["plain"], losses[name], strict=True))
    print(
        f"losses of three steps differ by {worst:.1e} from those of the plain step" + ("" if worst < LOSS_ERROR else ": WRONG")
    )
    return worst < LOSS_ERROR
