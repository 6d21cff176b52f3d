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


def collection(pooling: Any, shared: bool) -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

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
            pooling=pooling,
        )
        for n, names in features.items()
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))


def sharded(sharder: Any, kind: str, pooling: Any, shared: bool = False) -> Any:
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


def copied(source: Any, target: Any) -> None:
    with torch.no_grad():
        theirs = source.state_dict()
        for name, mine in target.state_dict().items():
            pairs = zip(mine.local_shards(), theirs[name].local_shards(), strict=True)
            for a, b in pairs:
                a.tensor.copy_(b.tensor)


def trained(
    me: Member, kind: str, mean: bool, optimizer: str, shared: bool, uneven: bool
) -> dict[str, Any]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import PoolingType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    from tileweave.integrations import torchrec as adapter

    pooling = PoolingType.MEAN if mean else PoolingType.SUM
    options = {"optimizer": EmbOptimType[optimizer], "learning_rate": 0.1}
    stock = sharded(EmbeddingBagCollectionSharder(dict(options)), kind, pooling, shared)
    ours = sharded(adapter.Sharder(dict(options)), kind, pooling, shared)
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
            assert outputs[0].keys() == outputs[1].keys()
            apart = max(
                apart, float((outputs[0].values() - outputs[1].values()).detach().abs().max())
            )
    finally:
        adapter.embedding_bag_all_to_all = inner
    theirs, mine = stock.state_dict(), ours.state_dict()
    assert theirs.keys() == mine.keys()
    optimizers = [m.fused_optimizer.state_dict()["state"] for m in (stock, ours)]
    return {
        "outputs": apart,
        "tables": max(shards_apart(mine[n], theirs[n]) for n in theirs),
        "moments": max(
            (
                shards_apart(optimizers[1][n][what], optimizers[0][n][what])
                for n in optimizers[0]
                for what in optimizers[0][n]
                if hasattr(optimizers[0][n][what], "local_shards")
            ),
            default=0.0,
        ),
        "calls": len(calls),
    }


def shards_apart(a: Any, b: Any) -> float:
    pairs = zip(a.local_shards(), b.local_shards(), strict=True)
    return max((float((x.tensor - y.tensor).abs().max()) for x, y in pairs), default=0.0)


@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"])
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("kind", ["table_wise", "column_wise"])
def test_tables_train_as_in_torchrec(pair: World, kind: str, mean: bool, optimizer: str) -> None:
    for found in pair.run(trained, kind, mean, optimizer, False, False, timeout=SECONDS):
        assert found.pop("calls") == STEPS
        assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize(
    ("kind", "optimizer", "shared", "uneven"),
    [
        ("table_wise", "EXACT_SGD", True, False),
        ("table_wise", "EXACT_ADAGRAD", False, False),
        ("table_wise", "EXACT_SGD", False, True),
    ],
    ids=["shared table", "other step", "uneven batch"],
)
def test_others_run_as_in_torchrec(
    pair: World, kind: str, optimizer: str, shared: bool, uneven: bool
) -> None:
    for found in pair.run(trained, kind, False, optimizer, shared, uneven, timeout=SECONDS):
        assert found.pop("calls") == 0
        assert max(found.values()) < 1e-5, found


def test_row_wise_tables_stay_torchrecs() -> None:
    """TorchRec's planner has no row-wise tables on the CPU."""
    from tileweave.integrations.torchrec import _why_stock

    assert _why_stock(None, "row_wise") == "they are not sharded by table or by column"
