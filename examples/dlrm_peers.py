"""A DLRM step by phases, beside two that are not fused; ``dlrm.py --time`` prints it.

========  ===================================================================================================
fused     ``ShardedEmbeddingBag``: lookups with stores to the samples' owners, gradients pushed to the tables'
unfused   the same lookups, the same sums and step in place, but NCCL all-to-alls and a copy into columns between
torch     a call of ``embedding_bag`` for each table, sparse gradients, ``torch.optim.SGD``, NCCL all-to-alls
========  ===================================================================================================

All else is the same for all three: the interaction's kernels, TF32 in the MLPs, the second stream with the next batch's
ids, the bottom MLP and the all-reduce; the unfused step sorts its lookups beside the exchange, as the fused one does.
"""

import itertools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from dlrm import RATE, Step, draw
from torch import nn

import tileweave as tw
from tileweave.launcher import Member
from tileweave.nn import ShardedEmbeddingBag
from tileweave.ops.reference import all_to_all_whole
from tileweave.ops.table_gradient import Lookups, sort_beside, table_gradients
from tileweave.sharding import EmbeddingLayout, rows_of

WHOLE = "whole step"


def to_samples(pooled: torch.Tensor, layout: EmbeddingLayout, rank: int) -> torch.Tensor:
    """Pooled vectors [B, own columns] to their samples' owners: an all-to-all, and one copy into columns."""
    (batch, width), size = pooled.shape, len(layout.dims)
    shares = [end - begin for begin, end in (rows_of(batch, size, r) for r in range(size))]
    sizes = [shares[rank] * sum(dims) for dims in layout.dims]
    got = all_to_all_whole(pooled.view(-1), [n * width for n in shares], sizes, dist.group.WORLD).split(sizes)
    placed = []
    for block, columns, dims in zip(got, layout.columns, layout.dims, strict=True):
        placed += zip(columns, block.view(shares[rank], sum(dims)).split(list(dims), 1), strict=True)
    return torch.cat([part for _, part in sorted(placed, key=lambda pair: pair[0])], 1)


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


class Unfused(torch.autograd.Function):
    """Our lookup, an exchange; backward an exchange, our sums and step in place."""

    @staticmethod
    def forward(ctx, anchor, module, indices, offsets, batch):
        ctx.module, ctx.batch = module, batch
        ctx.save_for_backward(indices, offsets)
        pooled = tw.embedding_bag([w.detach() for w in module.weights()], indices, offsets)
        return to_samples(pooled, module.layout, module.rank)

    @staticmethod
    def backward(ctx, grad):
        module, tables = ctx.module, [w.detach() for w in ctx.module.weights()]
        lookups = Lookups(*ctx.saved_tensors, None, ctx.batch, False)
        ordered = sort_beside(tables, lookups, grad.is_cuda)
        mine = to_tables(grad.contiguous(), module.layout, module.rank, ctx.batch)
        table_gradients(
            mine, tables, lookups, ordered, 1.0 / module.world_size, "sgd", (), module.optimizer.rate, 0.0, grad.is_cuda
        )
        return None, None, None, None, None


def unfused_lookup(module: ShardedEmbeddingBag) -> Callable:
    anchor = torch.zeros(1, device=module.optimizer.rate.device, requires_grad=True)
    return lambda indices, offsets, _, batch: Unfused.apply(anchor, module, indices, offsets, batch)


class Exchange(torch.autograd.Function):
    """:func:`to_samples`, and :func:`to_tables` backward."""

    @staticmethod
    def forward(ctx, pooled, layout, rank):
        ctx.layout, ctx.rank, ctx.batch = layout, rank, pooled.shape[0]
        return to_samples(pooled, layout, rank)

    @staticmethod
    def backward(ctx, grad):
        return to_tables(grad.contiguous(), ctx.layout, ctx.rank, ctx.batch), None, None


def torch_lookup(module: ShardedEmbeddingBag) -> Callable:
    """Torch alone: a call of ``embedding_bag`` for each table, sparse gradients; the caller's optimizer steps."""

    def lookup(indices, offsets, _, batch):
        bags = []
        for number, weight in enumerate(module.weights()):
            begins = offsets[number * batch : (number + 1) * batch + 1]
            rows = indices[begins[0] : begins[-1]]
            bags.append(
                nn.functional.embedding_bag(rows, weight, begins - begins[0], mode="sum", sparse=True, include_last_offset=True)
            )
        return Exchange.apply(torch.cat(bags, 1), module.layout, module.rank)

    return lookup


def steps_of(member: Member, rows: int, dim: int, hidden: int) -> dict[str, Step]:
    """The three steps, over the same tables."""
    steps = {"fused": Step(member, rows, dim, hidden)}
    tables = steps["fused"].tables
    for name, lookup in (("unfused", unfused_lookup(tables)), ("torch", torch_lookup(tables))):
        steps[name] = Step(member, rows, dim, hidden, tables, lookup)
    plain = torch.optim.SGD(tables.weights(), lr=RATE / member.world_size)
    steps["torch"].after = lambda: (plain.step(), plain.zero_grad())
    return steps


def losses_of(steps: dict[str, Step], batches: list) -> dict[str, list[float]]:
    """Three steps of each from the same weights; all have to lose alike."""
    tables = next(iter(steps.values())).tables
    before = [w.detach().clone() for w in tables.weights()]
    found = {}
    for name, step in steps.items():
        losses = [step(batches[i % 2], batches[(i + 1) % 2]) for i in range(3)]
        found[name] = torch.stack(losses).tolist()
        step.member.barrier()
        for weight, old in zip(tables.weights(), before, strict=True):
            weight.detach().copy_(old)
    return found


def timed(member: Member, samples: int, rows: int, dim: int, hidden: int) -> dict:
    """Milliseconds of each phase and of a step, on rank 0, medians over repeats, the three steps in turn; and their losses."""
    torch.set_float32_matmul_precision("high")
    steps = steps_of(member, rows, dim, hidden)
    batches = [draw(number, member.rank, samples, rows, 2, member.device) for number in range(2)]
    member.barrier()
    losses = losses_of(steps, batches)
    repeats, calls = (9, 8) if member.device.type == "cuda" else (1, 2)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            marks: list[tuple[str, float]] = []

            def phase(label: str, marks: list[tuple[str, float]] = marks) -> None:
                member.barrier()  # phases begin together and none runs beside another: their sum is far above a whole step
                marks.append((label, time.perf_counter()))

            step.ahead = None
            step(batches[0], batches[1], phase)
            for (label, begin), (_, end) in itertools.pairwise(marks):
                found[name].setdefault(label, []).append((end - begin) * 1e3)
            member.barrier()
            begin = time.perf_counter()
            for i in range(calls):
                step(batches[(i + 1) % 2], batches[i % 2])
            member.barrier()
            found[name].setdefault(WHOLE, []).append((time.perf_counter() - begin) * 1e3 / calls)
    tw.close()
    times = {name: {k: sorted(v)[len(v) // 2] for k, v in phases.items()} for name, phases in found.items()}
    return {"ms": times, "losses": losses, "samples": samples * member.world_size, "rows": rows, "dim": dim, "hidden": hidden}


def report(found: dict) -> bool:
    """Print the table; whether the three lost alike."""
    times, losses = found["ms"], found["losses"]
    print(f"{'ms':24}" + "".join(f"{name:>10}" for name in times))
    for label in times["fused"]:
        print(f"{label:24}" + "".join(f"{phases[label]:10.3f}" for phases in times.values()))
    for name in ("unfused", "torch"):
        print(f"the {name} step takes {times[name][WHOLE] / times['fused'][WHOLE]:.2f} times as long")
    worst = max(abs(a - b) / abs(a) for name in times for a, b in zip(losses["fused"], losses[name], strict=True))
    print(f"losses of three steps differ by {worst:.1e}" + ("" if worst < 1e-3 else ": WRONG"))
    return worst < 1e-3
