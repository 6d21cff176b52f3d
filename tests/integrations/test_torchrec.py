"""tileweave.integrations.torchrec against TorchRec's own sharded collection, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.worlds import Member, World

pytest.importorskip("torchrec", reason="pip install 'tileweave[torchrec]'", exc_type=ImportError)

pytestmark = pytest.mark.timeout(300)
SECONDS = 240  # of a job: the first one imports TorchRec, which takes a while on a busy machine
KEYS = ["f0", "f1", "f2", "f3"]
ROWS = {"t0": 50, "t1": 30, "t2": 20, "t3": 40}
DIMS = {"t0": 8, "t1": 16, "t2": 8, "t3": 4}
STEPS = 3


def collection(pooling: str, shared: bool) -> Any:
    """``pooling``: SUM, MEAN, or mixed: by table."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

    torch.manual_seed(0)
    features = {"t0": ["f0"], "t1": ["f1"], "t2": ["f2"], "t3": ["f3"]}
    if shared:
        features = {"t0": ["f0"], "t1": ["f1", "f3"], "t2": ["f2"]}
    tables = [
        EmbeddingBagConfig(
            name=n,
            embedding_dim=DIMS[n],
            num_embeddings=ROWS[n],
            feature_names=names,
            pooling=PoolingType[
                ("SUM", "MEAN")[n in ("t0", "t2")] if pooling == "mixed" else pooling
            ],
        )
        for n, names in features.items()
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))


def on_the_cpu(sharder: Any) -> Any:
    """``sharder``, to which the planner also gives tables by row, as on GPUs."""
    types = [*sharder.sharding_types("cpu"), "row_wise"]
    sharder.sharding_types = lambda device: types
    return sharder


def sharded(sharder: Any, kind: str, pooling: str, shared: bool = False) -> Any:
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingEnv

    model = torch.nn.Sequential()
    model.add_module("bags", collection(pooling, shared))
    kinds = {name: kind for name in ROWS}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={
            n: ParameterConstraints(sharding_types=[k], compute_kernels=["fused"], min_partition=4)
            for n, k in kinds.items()
        },
    )
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        sharders=[sharder],
        plan=plan,
    )


def batch(rank: int, step: int, samples: int) -> Any:
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(KEYS) * samples,), generator=generator)
    values = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=KEYS, values=values, lengths=lengths)


def whole(sharded_tensor: Any) -> torch.Tensor:
    """The tensor whose shards ranks have."""
    own = [
        (shard.metadata.shard_offsets, shard.tensor.detach())
        for shard in sharded_tensor.local_shards()
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    found = torch.full(sharded_tensor.size(), torch.nan)
    for offsets, tensor in (shard for shards in everyone for shard in shards):
        place = [slice(at, at + n) for at, n in zip(offsets, tensor.shape, strict=True)]
        found[place] = tensor
    return found


def copied(source: Any, target: Any) -> None:
    mine = target.state_dict()
    for name, theirs in source.state_dict().items():
        values = whole(theirs)
        for shard in mine[name].local_shards():
            sizes = zip(shard.metadata.shard_offsets, shard.tensor.shape, strict=True)
            with torch.no_grad():
                shard.tensor.copy_(values[[slice(at, at + n) for at, n in sizes]])


def trained(
    me: Member, kind: str, pooling: str, optimizer: str, shared: bool, uneven: bool
) -> dict[str, Any]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    from tileweave.integrations import torchrec as adapter

    options = {"optimizer": EmbOptimType[optimizer], "learning_rate": 0.1}
    other = "table_wise" if uneven and kind == "row_wise" else kind
    stock, ours = (
        sharded(on_the_cpu(sharder(dict(options))), how, pooling, shared)
        # gloo has no reduce-scatter of unequal sizes: those rows are compared with whole tables
        for sharder, how in (
            (EmbeddingBagCollectionSharder, other),
            (adapter.Sharder, kind),
        )
    )
    copied(stock, ours)
    calls: list[int] = []
    inner = adapter.embedding_bag_all_to_all
    adapter.embedding_bag_all_to_all = lambda *a, **k: (calls.append(1), inner(*a, **k))[1]
    apart = 0.0
    try:
        for step in range(STEPS):
            samples = 3 if uneven and me.rank == 0 else 5
            outputs = []
            for model in (stock, ours):
                y = model.module.bags(batch(me.rank, step, samples)).wait()
                y.values().square().sum().backward()
                outputs.append(y)
            assert {*outputs[0].keys()} == {*outputs[1].keys()}
            pairs = [[y[key] for y in outputs] for key in {*outputs[0].keys()}]
            apart = max(apart, *(float((a - b).detach().abs().max()) for a, b in pairs))
    finally:
        adapter.embedding_bag_all_to_all = inner
    theirs, mine = stock.state_dict(), ours.state_dict()
    assert theirs.keys() == mine.keys()
    optimizers = [m.fused_optimizer.state_dict()["state"] for m in (stock, ours)]
    return {
        "outputs": apart,
        "tables": max(
            float((whole(mine[n]) - whole(theirs[n])).abs().max()) for n in sorted(theirs)
        ),
        "moments": max(
            (
                shards_apart(optimizers[1][n][what], optimizers[0][n][what])
                for n in optimizers[0]
                for what in optimizers[0][n]
                if other == kind and hasattr(optimizers[0][n][what], "local_shards")
            ),
            default=0.0,
        ),
        "calls": len(calls),
    }


def shards_apart(a: Any, b: Any) -> float:
    pairs = zip(a.local_shards(), b.local_shards(), strict=True)
    return max((float((x.tensor - y.tensor).abs().max()) for x, y in pairs), default=0.0)


@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"])
@pytest.mark.parametrize("pooling", ["SUM", "MEAN", "mixed"])
@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "row_wise"])
def test_tables_train_as_in_torchrec(pair: World, kind: str, pooling: str, optimizer: str) -> None:
    for found in pair.run(trained, kind, pooling, optimizer, False, False, timeout=SECONDS):
        assert found.pop("calls") == STEPS
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"])
@pytest.mark.parametrize(("shared", "uneven"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "row_wise"])
def test_shared_tables_and_uneven_batches(
    pair: World, kind: str, shared: bool, uneven: bool, optimizer: str
) -> None:
    for found in pair.run(trained, kind, "mixed", optimizer, shared, uneven, timeout=SECONDS):
        assert found.pop("calls") == STEPS
        assert max(found.values()) < 1e-5, found


def test_other_steps_run_as_in_torchrec(pair: World) -> None:
    for found in pair.run(
        trained, "table_wise", "SUM", "EXACT_ADAGRAD", False, False, timeout=SECONDS
    ):
        assert found.pop("calls") == 0
        assert max(found.values()) < 1e-5, found


def test_data_parallel_tables_stay_torchrecs() -> None:
    from tileweave.integrations.torchrec import _why_stock

    assert _why_stock(None, "data_parallel") == "they are not sharded by table, column or row"
