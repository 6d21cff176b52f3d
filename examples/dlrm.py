"""DLRM on synthetic Criteo-shaped data: 26 embedding tables shared out over the ranks, MLPs on every rank.

    python examples/dlrm.py [ranks]            # trains; the losses must be those of one device. GPUs if there are two
    python examples/dlrm.py [ranks] --time     # also times a step by phases: fused; our lookup + NCCL; torch + NCCL

Multi-hot sizes are those of MLPerf's DLRM-v2 (one table has 100 rows a sample); tables are scaled to fit. A step:

    ids -> owners of tables | lookup to owners of samples | bottom MLP | interaction, top MLP, loss
    | backward; tables take an SGD step in place | all-reduce of the MLPs' gradients | MLPs' SGD step
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import tileweave as tw
from tileweave.launcher import Member, default_device_type, default_world_size, launch
from tileweave.nn import ShardedEmbeddingBag
from tileweave.ops.reference import all_to_all_whole, gradient_to_owners
from tileweave.sharding import rows_of

MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
DENSE, RATE, STEPS, TOLERANCE = 13, 0.05, 5, 1e-4


class Towers(nn.Module):
    """Bottom MLP, pairwise dot products of all features, top MLP."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        pairs = (len(MULTI_HOT) + 1) * len(MULTI_HOT) // 2
        self.bottom = nn.Sequential(nn.Linear(DENSE, hidden), nn.ReLU(), nn.Linear(hidden, dim), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(dim + pairs, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        rows, cols = torch.tril_indices(len(MULTI_HOT) + 1, len(MULTI_HOT) + 1, -1)
        self.register_buffer("pairs", rows * (len(MULTI_HOT) + 1) + cols, persistent=False)

    def forward(self, x: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """x [b, dim] from the bottom MLP, pooled [b, 26 * dim] -> logits [b]."""
        features = torch.cat([x[:, None], pooled.view(x.shape[0], -1, x.shape[1])], 1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([x, products], 1)).squeeze(1)


def specs(rows: int, dim: int) -> list[tw.TableSpec]:
    return [tw.TableSpec(f"t{i}", rows, dim, n) for i, n in enumerate(MULTI_HOT)]


def draw(step: int, rank: int, samples: int, rows: int, scale: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """(dense, labels, lengths, values) of one rank: bags of about the multi-hot sizes over ``scale``, some empty."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    dense, labels = torch.randn(samples, DENSE, generator=generator), torch.rand(samples, generator=generator).round()
    lengths = torch.stack([torch.randint(0, 2 * max(n // scale, 1) + 1, (samples,), generator=generator) for n in MULTI_HOT])
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
    return dense.to(device), labels.to(device), lengths.view(-1).to(device), values.to(device)


def whole_tables(rows: int, dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, dim, generator=generator) * 0.3 for _ in MULTI_HOT]


def on_one_device(size: int, samples: int, rows: int, dim: int, hidden: int, scale: int) -> list[float]:
    """The same training in plain torch: all tables, the global batch."""
    device = torch.device("cpu")
    torch.manual_seed(0)
    towers = Towers(dim, hidden)
    tables = [nn.EmbeddingBag.from_pretrained(t, freeze=False, mode="sum") for t in whole_tables(rows, dim)]
    optimizer = torch.optim.SGD([*towers.parameters(), *(t.weight for t in tables)], lr=RATE)
    losses = []
    for step in range(STEPS):
        parts = []
        for rank in range(size):
            dense, labels, lengths, values = draw(step, rank, samples, rows, scale, device)
            bags, at = [], 0
            for table, counts in zip(tables, lengths.view(len(MULTI_HOT), samples), strict=True):
                offsets = counts.cumsum(0) - counts
                bags.append(table(values[at : at + int(counts.sum())], offsets))
                at += int(counts.sum())
            logits = towers(towers.bottom(dense), torch.cat(bags, 1))
            parts.append(nn.functional.binary_cross_entropy_with_logits(logits, labels))
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Step:
    """One training step on one rank; ``phase`` is told where each part begins."""

    def __init__(
        self, member: Member, rows: int, dim: int, hidden: int, tables: ShardedEmbeddingBag | None = None,
        lookup: Callable | None = None,
    ) -> None:  # fmt: skip
        self.member = member
        torch.manual_seed(0)
        self.towers = Towers(dim, hidden).to(member.device)
        self.tables = tables or ShardedEmbeddingBag(
            specs(rows, dim), device=member.device, optimizer="sgd", learning_rate=RATE, divide_gradient=True
        )
        self.optimizer = torch.optim.SGD(self.towers.parameters(), lr=RATE)
        self.lookup = lookup or self.tables.lookup
        self.after: Callable[[], object] = lambda: None  # a step of the tables, where backward did not take it

    def __call__(self, batch: tuple[torch.Tensor, ...], phase: Callable[[str], object] = lambda name: None) -> torch.Tensor:
        dense, labels, lengths, values = batch
        phase("ids to owners")
        indices, offsets, _ = tw.distribute_indices(lengths, values, self.tables.features)
        phase("lookup, to owners")
        pooled = self.lookup(indices, offsets, None, dense.shape[0] * self.member.world_size)
        phase("bottom MLP")
        x = self.towers.bottom(dense)
        phase("interaction, top MLP")
        pooled_leaf = pooled.detach().requires_grad_()  # so that the two halves of backward can be told apart
        loss = nn.functional.binary_cross_entropy_with_logits(self.towers(x, pooled_leaf), labels)
        phase("backward of MLPs")
        self.optimizer.zero_grad()
        loss.backward()
        phase("backward of tables")
        pooled.backward(pooled_leaf.grad)
        self.after()
        phase("all-reduce, step")
        flat = torch.cat([p.grad.view(-1) for p in self.towers.parameters()])
        dist.all_reduce(flat)
        flat /= self.member.world_size
        for parameter, grad in zip(self.towers.parameters(), flat.split([p.numel() for p in self.towers.parameters()]),
                                   strict=True):  # fmt: skip
            parameter.grad.copy_(grad.view_as(parameter))
        self.optimizer.step()
        phase("")
        return loss.detach()


def train(member: Member, samples: int, rows: int, dim: int, hidden: int, scale: int) -> tuple[list[float], str]:
    """Losses over all ranks, and the plan's explanation."""
    step = Step(member, rows, dim, hidden)
    step.tables.load_tables([t.to(member.device) for t in whole_tables(rows, dim)])
    losses = []
    for number in range(STEPS):
        loss = step(draw(number, member.rank, samples, rows, scale, member.device))
        dist.all_reduce(loss)
        losses.append(loss.item() / member.world_size)
    tw.close()
    return losses, step.tables.plan.explain()


# --- Time ---


class Exchange(torch.autograd.Function):
    """Pooled vectors [B, own columns] to their samples' owners with NCCL, a copy into columns; backward the other way round."""

    @staticmethod
    def forward(ctx, pooled, layout, rank):
        ctx.layout, (batch, width), size = layout, pooled.shape, len(layout.dims)
        ctx.batch = batch
        splits = [(end - begin) * width for begin, end in (rows_of(batch, size, r) for r in range(size))]
        begin, end = rows_of(batch, size, rank)
        sizes = [(end - begin) * sum(dims) for dims in layout.dims]
        blocks = all_to_all_whole(pooled.view(-1), splits, sizes, dist.group.WORLD).split(sizes)
        y = pooled.new_empty(end - begin, layout.width)
        for block, columns, dims in zip(blocks, layout.columns, layout.dims, strict=True):
            parts = block.view(end - begin, -1).split(list(dims), 1)
            for part, column in zip(parts, columns, strict=True):
                y[:, column : column + part.shape[1]] = part
        return y

    @staticmethod
    def backward(ctx, grad):
        return gradient_to_owners(grad, ctx.layout, ctx.batch, dist.group.WORLD), None, None


def unfused_lookup(module: ShardedEmbeddingBag) -> Callable:
    """Our own lookup and our own step in place, but NCCL and copies between them."""
    rate = module.optimizer.rate / module.world_size  # a mean over ranks
    optimizer = tw.FusedOptimizer("sgd", rate)

    def lookup(indices, offsets, _, batch):
        return Exchange.apply(
            tw.embedding_bag(module.weights(), indices, offsets, optimizer=optimizer), module.layout, module.rank
        )

    return lookup


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


def timed(member: Member, samples: int, rows: int, dim: int, hidden: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each phase, mean over ranks of the median over steps, of the three steps in turn."""
    steps = {"fused": Step(member, rows, dim, hidden)}
    tables = steps["fused"].tables  # one set of tables is enough
    for name, lookup in (("unfused", unfused_lookup(tables)), ("torch", torch_lookup(tables))):
        steps[name] = Step(member, rows, dim, hidden, tables, lookup)
    plain = torch.optim.SGD(tables.weights(), lr=RATE / member.world_size)
    steps["torch"].after = lambda: (plain.step(), plain.zero_grad())
    batches = [draw(number, member.rank, samples, rows, 2, member.device) for number in range(2)]
    found: dict[str, dict[str, list[float]]] = {name: {} for name in steps}
    for number in range(10 if member.device.type == "cuda" else 1):
        for name, step in steps.items():
            marks: list[tuple[str, float]] = []

            def phase(label: str, marks: list[tuple[str, float]] = marks) -> None:
                member.barrier()  # phases begin together: the sum of phases is above the time of an undivided step
                marks.append((label, time.perf_counter()))

            step(batches[number % 2], phase)
            for (label, begin), (_, end) in itertools.pairwise(marks):
                found[name].setdefault(label, []).append((end - begin) * 1e3)
            member.barrier()
            begin = time.perf_counter()
            for batch in batches * 2:
                step(batch)
            member.barrier()
            found[name].setdefault("whole step", []).append((time.perf_counter() - begin) * 1e3 / len(batches) / 2)
    tw.close()
    return {name: {k: sorted(v)[len(v) // 2] for k, v in phases.items()} for name, phases in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", nargs="?", type=int)
    parser.add_argument("--time", action="store_true")
    words = parser.parse_args()
    kind = default_device_type()
    size = default_world_size(kind, words.ranks)
    small = (6, 40, 8, 16, 10) if kind == "cpu" else (64, 1000, 32, 64, 2)
    print(f"{size} ranks on {kind}, {size * small[0]} samples, 26 tables of {small[1]} x {small[2]}")
    losses, plan = launch(train, *small, world_size=size, device_type=kind, seconds=300)
    wanted = on_one_device(size, *small)
    print(plan)
    for step, (loss, want) in enumerate(zip(losses, wanted, strict=True)):
        print(f"step {step}: loss {loss:.6f}, on one device {want:.6f}")
    right = all(abs(loss - want) <= TOLERANCE * abs(want) for loss, want in zip(losses, wanted, strict=True))
    print("the same losses" if right else "the losses DIFFER")
    if words.time:
        large = (16384, 1_000_000, 128, 512) if kind == "cuda" else (4, 40, 8, 16)
        phases = launch(timed, *large, world_size=size, device_type=kind, seconds=300)
        print(f"{'ms':24}" + "".join(f"{name:>10}" for name in phases))
        for label in phases["fused"]:
            print(f"{label:24}" + "".join(f"{found[label]:10.3f}" for found in phases.values()))
        for name in ("unfused", "torch"):
            ratio = phases[name]["whole step"] / phases["fused"]["whole step"]
            print(f"the {name} step takes {ratio:.2f} times as long")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
