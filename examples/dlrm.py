"""DLRM on synthetic Criteo-shaped data: 26 embedding tables sharded over the ranks, MLPs
replicated.

    python examples/dlrm.py [ranks]         # train; losses must equal those on one device
    python examples/dlrm.py [ranks] --time  # also time a step by phases; see dlrm_peers.py

It runs on GPUs if there are two. Multi-hot sizes are those of MLPerf's DLRM-v2 (one table has 100
rows per sample) divided by 2, on CPUs by 10; tables are scaled to fit. A step:

    ids to the owners of tables | lookup to the owners of samples | bottom MLP
    | interaction, top MLP, loss | backward with an SGD step of the tables in place
    | all-reduce of the gradients of the MLPs | SGD step of the MLPs
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from interaction import interaction, width_of
from torch import nn

import tileweave as tw
from tileweave.bench.environment import WITHOUT_GPUS, environment
from tileweave.bench.prerequisites import file_for
from tileweave.errors import require
from tileweave.launcher import (
    Member,
    default_device_type,
    default_world_size,
    end_with,
    launch,
    under_torchrun,
)
from tileweave.nn import ShardedEmbeddingBag
from tileweave.ops.core.collectives import all_reduce

MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
DENSE, RATE, STEPS, TOLERANCE = 13, 0.05, 5, 1e-4
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Towers(nn.Module):
    """The bottom MLP, the pairwise dot products of all features, and the top MLP."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(DENSE, hidden), nn.ReLU(), nn.Linear(hidden, dim), nn.ReLU()
        )
        self.top = nn.Sequential(
            nn.Linear(width_of(len(MULTI_HOT) + 1, dim), hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, x: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """x [b, dim] from the bottom MLP, pooled [b, 26 * dim] -> logits [b]."""
        return self.top(interaction(x, pooled)).squeeze(1)


def towers_from_seed(dim: int, hidden: int) -> Towers:
    torch.manual_seed(0)
    return Towers(dim, hidden)


def specs(rows: int, dim: int) -> list[tw.TableSpec]:
    return [tw.TableSpec(f"t{i}", rows, dim, n) for i, n in enumerate(MULTI_HOT)]


def draw(step: int, rank: int, samples: int, rows: int, scale: int, device: torch.device) -> Batch:
    """(dense, labels, lengths, values) of one rank. Bags have about the multi-hot sizes divided by
    ``scale``; some are empty."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    dense = torch.randn(samples, DENSE, generator=generator)
    labels = torch.rand(samples, generator=generator).round()
    limits = [2 * max(n // scale, 1) + 1 for n in MULTI_HOT]
    lengths = torch.stack([torch.randint(0, n, (samples,), generator=generator) for n in limits])
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
    return dense.to(device), labels.to(device), lengths.view(-1).to(device), values.to(device)


def whole_tables(rows: int, dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, dim, generator=generator) * 0.3 for _ in MULTI_HOT]


def on_one_device(
    size: int, samples: int, rows: int, dim: int, hidden: int, scale: int
) -> list[float]:
    """The same training in plain torch: all tables, the global batch."""
    device = torch.device("cpu")
    towers = towers_from_seed(dim, hidden)
    tables = [
        nn.EmbeddingBag.from_pretrained(t, freeze=False, mode="sum")
        for t in whole_tables(rows, dim)
    ]
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
    """A training step on one rank without concurrency; ``dlrm_peers.py`` overlaps its phases."""

    def __init__(self, member: Member, rows: int, dim: int, hidden: int) -> None:
        self.member = member
        self.towers = towers_from_seed(dim, hidden).to(member.device)
        self.tables = ShardedEmbeddingBag(
            specs(rows, dim),
            device=member.device,
            optimizer="sgd",
            learning_rate=RATE,
            divide_gradient=True,
        )
        self.optimizer = torch.optim.SGD(self.towers.parameters(), lr=RATE)

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Train on ``batch``. Returns the loss of this rank's samples."""
        dense, labels, lengths, values = batch
        pooled = self.tables(lengths, values)
        loss = nn.functional.binary_cross_entropy_with_logits(
            self.towers(self.towers.bottom(dense), pooled), labels
        )
        self.optimizer.zero_grad()
        loss.backward()  # also updates the tables
        for parameter in self.towers.parameters():
            parameter.grad = all_reduce(parameter.grad, dist.group.WORLD) / self.member.world_size
        self.optimizer.step()
        return loss.detach()


def train(
    member: Member, samples: int, rows: int, dim: int, hidden: int, scale: int
) -> tuple[list[float], str]:
    """The mean losses over all ranks, and the explanation of the sharding plan."""
    step = Step(member, rows, dim, hidden)
    step.tables.load_tables([t.to(member.device) for t in whole_tables(rows, dim)])
    losses = []
    for number in range(STEPS):
        loss = step(draw(number, member.rank, samples, rows, scale, member.device))
        dist.all_reduce(loss)
        losses.append(loss.item() / member.world_size)
    tw.close()
    return losses, step.tables.plan.explain()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "ranks", nargs="?", type=int, help="default: as many as GPUs, up to 4, or 4 on the CPU"
    )
    parser.add_argument(
        "--time", action="store_true", help="also time a step by phases, and those of its rivals"
    )
    parser.add_argument("--json", type=Path, help="with --time: the file to write the times to")
    words = parser.parse_args()
    require(
        not under_torchrun(),
        "a rank of torchrun",
        "a process that starts its ranks itself",
        "run it with python",
    )
    kind = default_device_type()
    size = default_world_size(kind, words.ranks)
    require(
        words.time or words.json is None, "--json without --time", "only with --time", "add --time"
    )
    file_for(words.json)
    small = (6, 40, 8, 16, 10) if kind == "cpu" else (64, 1000, 32, 64, 2)
    print(
        f"{size} ranks on {kind}, {size * small[0]} samples, 26 tables of {small[1]} x {small[2]}"
    )
    losses, plan = launch(train, *small, world_size=size, device_type=kind, seconds=300)
    wanted = on_one_device(size, *small)
    print(plan)
    for step, (loss, want) in enumerate(zip(losses, wanted, strict=True)):
        print(f"step {step}: loss {loss:.6f}, on one device {want:.6f}")
    right = all(
        abs(loss - want) <= TOLERANCE * abs(want) for loss, want in zip(losses, wanted, strict=True)
    )
    print("the same losses" if right else "the losses DIFFER")
    if words.time:
        from dlrm_peers import report, timed

        large = (16384, 1_000_000, 128, 512) if kind == "cuda" else (4, 40, 8, 16)
        found = launch(timed, *large, world_size=size, device_type=kind, seconds=300)
        if kind == "cpu":
            print(WITHOUT_GPUS)
        right = report(found) and right
        if words.json:
            about = {"world_size": size, "environment": environment()}
            words.json.write_text(json.dumps(about | found, indent=1), "utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    end_with(main)
