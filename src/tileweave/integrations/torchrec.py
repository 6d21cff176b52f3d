"""TorchRec: sharded embedding bags whose lookup and all-to-all are one operator.

>>> from tileweave.integrations.torchrec import Sharder
>>> model = DistributedModelParallel(model, sharders=[Sharder()], plan=plan)

:class:`Sharder` is TorchRec's ``EmbeddingBagCollectionSharder``. Planner, exchange of indices,
tables, names in checkpoints and fused optimizers are TorchRec's. For tables that are sharded by
table, column or row, its modules call :func:`tileweave.embedding_bag_all_to_all` on the memory of
FBGEMM's tables, which also takes the optimizer's step there. All other tables, and batches of
another size for each feature, run as in TorchRec: see :func:`_why_stock`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tileweave.errors import InputError, require
from tileweave.ops.embedding.bag_all_to_all import embedding_bag_all_to_all
from tileweave.ops.embedding.inputs import FusedOptimizer
from tileweave.planning.sharding import EmbeddingLayout

try:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import comm_ops
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.embeddingbag import (
        EmbeddingBagCollectionSharder,
        ShardedEmbeddingBagCollection,
    )
    from torchrec.distributed.types import NoWait, ShardingType
    from torchrec.modules.embedding_configs import DataType, PoolingType
except ImportError as error:
    raise InputError(
        "asked: tileweave.integrations.torchrec; allowed: with torchrec 1.9 and fbgemm-gpu; "
        f"remedy: pip install 'tileweave[torchrec]' ({error})"
    ) from error

__all__ = ["Sharder"]

STEPS = {EmbOptimType.EXACT_SGD: "sgd", EmbOptimType.EXACT_ROWWISE_ADAGRAD: "adagrad"}
BY_ROW = ShardingType.ROW_WISE.value
KINDS = (ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value, BY_ROW)
_LOG = logging.getLogger("tileweave")


class ShardedBags(ShardedEmbeddingBagCollection):
    """TorchRec's sharded collection, some of whose groups of tables call tileweave."""

    def _create_output_dist(self) -> None:
        super()._create_output_dist()
        for place, sharding in enumerate(self._embedding_shardings):
            reason = _why_stock(sharding, self._sharding_types[place])
            if reason is not None:
                _LOG.warning("%s tables stay TorchRec's: %s", self._sharding_types[place], reason)
                continue
            lookup, stock = self._lookups[place], self._output_dists[place]
            sums = self._sharding_types[place] == BY_ROW
            self._output_dists[place] = LookupAndExchange(sharding, lookup, stock, sums)


class Sharder(EmbeddingBagCollectionSharder):
    """Pass it to ``DistributedModelParallel(sharders=[...])``, and to the planner.

    It takes the arguments of TorchRec's ``EmbeddingBagCollectionSharder``. Tables that cannot be
    looked up by tileweave stay TorchRec's, with one warning.
    """

    def shard(
        self,
        module: Any,
        params: Any,
        env: Any,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedBags:
        return ShardedBags(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
        )

    @property
    def sharded_module_type(self) -> type[ShardedBags]:
        return ShardedBags


def _why_stock(sharding: Any, kind: str) -> str | None:
    """Why the tables of ``sharding`` cannot call the operator; None: they can. It looks at the
    tables of all ranks, so all ranks decide the same."""
    if kind not in KINDS:
        return "they are not sharded by table, column or row"
    if sharding.qcomm_codecs_registry:
        return "what is sent is quantised"
    groups = [group for rank in sharding._grouped_embedding_configs_per_rank for group in rank]
    if not groups:
        return "there are none"
    if any(group.compute_kernel != EmbeddingComputeKernel.FUSED for group in groups):
        return "their kernel is not FBGEMM's fused one in the memory of the device"
    if any(group.data_type != DataType.FP32 for group in groups):
        return "they are not float32"
    if any(group.is_weighted or group.has_feature_processor for group in groups):
        return "their features have weights or a processor"
    return _why_other_step(groups)


def _why_other_step(groups: list[Any]) -> str | None:
    options = [group.fused_params or {} for group in groups]
    kinds = {each.get("optimizer", EmbOptimType.EXACT_SGD) for each in options}
    if len(kinds) > 1 or not kinds <= set(STEPS):
        return f"the step of {', '.join(sorted(str(kind) for kind in kinds))}"
    for name in ("weight_decay", "gradient_clipping", "max_gradient", "max_norm"):
        if any(each.get(name) for each in options):
            return f"{name} in the fused step"
    if len({(each.get("learning_rate"), each.get("eps")) for each in options}) > 1:
        return "learning rates that differ"
    return None


class _Looked:
    """What the lookup of a group returns: the features, which are looked up in the exchange."""

    def __init__(self, features: Any, stock: Callable[[Any], torch.Tensor]) -> None:
        self.features, self.stock = features, stock


class LookupAndExchange(nn.Module):
    """The lookup and the exchange of one sharding, in place of TorchRec's two modules.

    Parameters
    ----------
    sharding : EmbeddingSharding
        The tables of all ranks.

    lookup : nn.Module
        TorchRec's lookup, which owns FBGEMM's tables. Its forward is replaced: it only passes on
        the features.

    stock : nn.Module
        TorchRec's exchange, for batches that do not fit.

    sums : bool
        Each rank has some rows of every table: what is received from the ranks is summed.
    """

    def __init__(self, sharding: Any, lookup: nn.Module, stock: nn.Module, sums: bool) -> None:
        super().__init__()
        self.stock, self.sums = stock, sums
        self.group: dist.ProcessGroup = sharding._pg
        per_rank = sharding._grouped_embedding_configs_per_rank
        groups = [group for rank in per_rank for group in rank]
        # rows of one bag may be on several ranks: TorchRec divides its sum afterwards
        means = {group.pooling == PoolingType.MEAN and not sums for group in groups}
        self.mode = "mean" if means == {True} else "sum"
        self.kind = STEPS[(groups[0].fused_params or {}).get("optimizer", EmbOptimType.EXACT_SGD)]
        self.layout = EmbeddingLayout.in_rank_order(
            [[dim for group in rank for dim in group.embedding_dims()] for rank in per_rank]
        )
        # a fused step would be taken once for each feature
        self.shared = any(t.num_features() > 1 for group in groups for t in group.embedding_tables)
        own = per_rank[dist.get_rank(self.group)]
        counts = [table.num_features() for group in own for table in group.embedding_tables]
        self.table_of = [at for at, count in enumerate(counts) for _ in range(count)]
        self.means = [  # of own features, where some are summed and some averaged
            group.pooling == PoolingType.MEAN
            for group in own
            for _ in range(group.num_features())
            if len(means) > 1
        ]
        self.bags: list[Any] = [kernel.emb_module for kernel in getattr(lookup, "_emb_modules", ())]
        self.rate: torch.Tensor | None = None
        forward = lookup.forward
        lookup.forward = lambda features: _Looked(features, forward)

    def forward(self, looked: Any, context: Any = None) -> Any:
        sizes = self._batch_sizes(looked.features, context)
        if sizes is None:
            return self.stock(looked.stock(looked.features), context)
        tables = [w for bags in self.bags for w in bags.split_embedding_weights()]
        steps = torch.is_grad_enabled()
        step = self._step(looked.features.values().device) if steps else None
        if steps:
            tables = [table.detach().requires_grad_() for table in tables]
        if step is not None and self.shared:
            for at, table in enumerate(tables):
                table.register_post_accumulate_grad_hook(_StepAfterSum(step, at))
        values, offsets = looked.features.values(), looked.features.offsets()
        rank, most = dist.get_rank(self.group), max(sizes)
        batch = sum(sizes)
        if not _equal_chunks(sizes):
            batch, offsets = most * len(sizes), _padded(offsets, sizes, most)
        if not tables:
            offsets = offsets.new_zeros(1)
        y = embedding_bag_all_to_all(
            [tables[at] for at in self.table_of],
            values.contiguous(),
            offsets.to(values.dtype),
            batch=batch,
            mode=self.mode,
            per_sample_weights=self._shares(offsets, values) if self.means and tables else None,
            layout=self.layout,
            gradient="sparse" if self.shared else "dense",
            optimizer=None if self.shared else step,
            divide_gradient=comm_ops.get_gradient_division(),
            group=self.group,
        )[: sizes[rank]]
        if self.sums:
            y = y.unflatten(1, (len(sizes), -1)).sum(1)
        for callback in getattr(self.stock, "_callbacks", None) or ():
            y = callback(y)
        return NoWait(y)

    def _shares(self, offsets: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The weight of each index: 1 in a feature that is summed, 1 / n in a bag of n indices that
        is averaged."""
        lengths = offsets.diff()
        means = torch.tensor(self.means, device=offsets.device)
        means = means.repeat_interleave(lengths.numel() // len(self.means))
        shares = torch.where(means, 1.0 / lengths.clamp(min=1), 1.0)
        return shares.float().repeat_interleave(lengths, output_size=values.numel())

    def _batch_sizes(self, features: Any, context: Any) -> list[int] | None:
        """The samples of each rank; None: features have batches of their own, or all are empty."""
        size = dist.get_world_size(self.group)
        if context is None or context.variable_batch_per_feature:
            return None
        sizes = list(context.batch_size_per_rank) or [features.stride() // size] * size
        return sizes if sum(sizes) else None

    def _step(self, device: torch.device) -> FusedOptimizer:
        rates = {float(bags.learning_rate_tensor) for bags in self.bags}
        require(
            len(rates) <= 1,
            f"learning rates {sorted(rates)} in one sharding",
            "one",
            "set the same for all tables, or use TorchRec's EmbeddingBagCollectionSharder",
        )
        rate = rates.pop() if rates else 0.0
        if self.rate is None:
            self.rate = torch.empty(1, device=device)
        self.rate.fill_(rate)
        states = []
        if self.kind == "adagrad":
            states = [s[0] for bags in self.bags for s in bags.split_optimizer_states()]
        epsilon = float(self.bags[0].optimizer_args.eps) if self.bags else 1e-8
        return FusedOptimizer(self.kind, self.rate, states, epsilon)


class _StepAfterSum:
    """The step of one table, after the gradients of all its features are summed: a hook of it."""

    def __init__(self, step: FusedOptimizer, at: int) -> None:
        self.step, self.at = step, at

    def __call__(self, table: torch.Tensor) -> None:
        assert table.grad is not None, "called after it was accumulated"
        grad = table.grad.coalesce()
        table.grad = None
        rows, values = grad.indices()[0], grad.values()
        with torch.no_grad():
            if self.step.kind == "adagrad":
                moment = self.step.states[self.at].view(-1)
                moment.index_add_(0, rows, values.square().mean(1).to(moment.dtype))
                values = values / (moment[rows].sqrt() + self.step.epsilon)[:, None]
            table.index_add_(0, rows, -self.step.rate * values)


def _equal_chunks(sizes: list[int]) -> bool:
    """Whether ranks have the samples that the operator gives them."""
    batch = sum(sizes)
    most = -(-batch // len(sizes))
    return sizes == [min(most, max(0, batch - rank * most)) for rank in range(len(sizes))]


def _padded(offsets: torch.Tensor, sizes: list[int], most: int) -> torch.Tensor:
    """``offsets`` of bags of all ranks, with empty bags after those of each rank, so that each has
    ``most``."""
    place, begins = torch.arange(most), 0
    at = []
    for size in sizes:
        at.append(begins + place.clamp(max=size))
        begins += size
    bags = torch.cat(at).to(offsets.device)
    starts = torch.arange(0, offsets.numel() - 1, begins, device=offsets.device)
    return torch.cat([offsets[(starts[:, None] + bags).view(-1)], offsets[-1:]])
