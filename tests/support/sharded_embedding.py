"""Shared by CPU and GPU tests: indices that are sent to the owners of their tables, and the
module."""

from __future__ import annotations

import torch
from tests.support.tolerances import assert_norm_near
from tests.support.worlds import Member

import tileweave as tw


def distribution(
    me: Member, features: list[list[int]], count: int, samples: int, weighted: bool
) -> None:
    """Every rank computes what it must receive from the jagged tensors of all ranks."""

    def jagged(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(rank + 5)
        lengths = torch.randint(0, 5, (count * samples,), generator=generator)
        values = torch.randint(0, 1000, (int(lengths.sum()),), generator=generator)
        return lengths, values, values * 0.5 + rank

    lengths, values, weights = (t.to(me.device) for t in jagged(me.rank))
    first = tw.begin_distribute_indices(
        lengths, values, features, weights=weights if weighted else None
    )
    fewer = lengths[: count * (samples // 2)]
    other = tw.distribute_indices(fewer, values[: int(fewer.sum())], features)
    indices, offsets, scales = first.finish()
    assert other[0].numel() == int(other[1][-1]), "lists of other lengths between the halves"
    everyone = [jagged(rank) for rank in range(me.world_size)]
    want: list[float] = []
    ends = [0]
    for feature in features[me.rank]:
        for other, data, scale in everyone:
            starts = torch.cat([torch.zeros(1, dtype=torch.int64), other.cumsum(0)])
            for sample in range(feature * samples, (feature + 1) * samples):
                chosen = slice(int(starts[sample]), int(starts[sample + 1]))
                want += (scale if weighted else data)[chosen].tolist()
                ends.append(ends[-1] + chosen.stop - chosen.start)
    assert offsets.tolist() == ends
    assert (indices if scales is None else scales).tolist() == want


def sharded_embedding_bag(me: Member, optimizer: str | None) -> None:
    """Compare the module with whole nn.EmbeddingBag tables on one device: outputs, and the tables
    after steps."""
    from tileweave.nn import ShardedEmbeddingBag

    specs = [tw.TableSpec("a", 11, 8, 2), tw.TableSpec("b", 7, 16, 40), tw.TableSpec("c", 30, 4, 1)]
    samples, count = 3, len(specs)
    module = ShardedEmbeddingBag(specs, device=me.device, optimizer=optimizer, learning_rate=0.1)
    generator = torch.Generator().manual_seed(4)
    whole = [torch.randn(s.rows, s.dim, generator=generator) for s in specs]
    module.load_tables([w.to(me.device) for w in whole])
    bags = [
        torch.nn.EmbeddingBag.from_pretrained(w.double(), freeze=False, mode="sum") for w in whole
    ]
    assert "rank 0:" in module.plan.explain()
    jagged = []
    for rank in range(me.world_size):
        draws = torch.Generator().manual_seed(50 + rank)
        lengths = torch.randint(0, 4, (count, samples), generator=draws)
        counts = zip(specs, lengths.sum(1).tolist(), strict=True)
        jagged.append(
            (lengths, [torch.randint(0, spec.rows, (n,), generator=draws) for spec, n in counts])
        )
    lengths, values = jagged[me.rank]
    y = module(lengths.view(-1).to(me.device), torch.cat(values).to(me.device))
    outs = []
    for number, bag in enumerate(bags):
        column = [
            bag(v[number], torch.cat([torch.zeros(1, dtype=torch.int64), n[number].cumsum(0)[:-1]]))
            for n, v in jagged
        ]
        outs.append(torch.stack(column))
    want = torch.cat(outs, -1)
    assert_norm_near(y, want[me.rank].detach(), 1e-6, f"rank {me.rank}: output")
    y.square().sum().backward()
    want.square().sum().backward()
    for table, weight, bag in zip(range(count), module.whole_tables(), bags, strict=True):
        grad = bag.weight.grad
        if optimizer is None:
            continue
        step = 0.1 * grad
        if optimizer == "adagrad":
            parts = [s for s in module.plan.shards if s.table == table]
            step = torch.cat(
                [
                    0.1 * g / (g.square().mean(1).sqrt() + 1e-8)[:, None]
                    for g in grad.split([s.dim for s in sorted(parts, key=lambda s: s.column)], 1)
                ],
                1,
            )
        assert_norm_near(
            weight,
            bag.weight.detach() - step,
            1e-5,
            f"rank {me.rank}, table {table} after a step of {optimizer}",
        )
    if optimizer is None:
        for shard, parameter in zip(module.plan.of_rank(me.rank), module.parameters(), strict=True):
            grad = bags[shard.table].weight.grad[:, shard.column : shard.column + shard.dim]
            assert_norm_near(parameter.grad, grad, 1e-5, f"rank {me.rank}: gradient of {shard}")
