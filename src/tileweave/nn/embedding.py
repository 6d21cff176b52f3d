"""Embedding tables sharded over a group: pooled lookups of the global batch, whose results go to
the ranks that own the samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tileweave.errors import require
from tileweave.nn.linear import draw_seed, generator_of
from tileweave.ops.core.argument_types import checks_types, checks_types_first
from tileweave.ops.core.collectives import exchange_numbers
from tileweave.ops.core.registry import Group, group_of, name_of, rank_and_size
from tileweave.ops.embedding.bag_all_to_all import embedding_bag_all_to_all
from tileweave.ops.embedding.distribute_indices import FLOATS, begin_distribute_indices
from tileweave.ops.embedding.inputs import DTYPES, INDEX_DTYPES, FusedOptimizer
from tileweave.planning.sharding import Shard, ShardingPlan, TableSpec, plan_sharding


class ShardedEmbeddingBag(nn.Module):
    """Many ``nn.EmbeddingBag`` tables, sharded over a group by tables or by columns.

    ========  =======================  =======================================================
    lengths   [F * b]                  indices per bag of own samples, feature after feature
    values    [sum(lengths)]           the indices, as in TorchRec's KeyedJaggedTensor; int32
                                       or int64
    y         [b, sum of all dims]     features in the same order
    weights   [rows, dim]              ``embedding_bags.TABLE.weight``, as in TorchRec, on the
                                       rank that owns the table
    parts     [rows, dim of the part]  ``embedding_bags.TABLE.weight_C`` of a table that is split
                                       by columns: the part from column C on
    moments   [rows] fp32              with "adagrad", ``moment`` or ``moment_C`` in the same
                                       place: sums of mean squares of gradients
    ========  =======================  =======================================================

    F counts the features of all tables, in the order in which the tables were given; most tables
    have one. Features that share a table are one ``TableSpec(..., features=n)``: they follow each
    other in ``lengths`` and y, and read and train one weight.

    No two ranks have a name in common, so ``torch.distributed.checkpoint`` saves every table, and
    loads it on whichever rank owns it then; columns must be split as they were.

    Weights are initialized as in ``nn.EmbeddingBag``. ``print(module.plan.explain())`` shows which
    rank owns what.

    Parameters
    ----------
    tables : sequence of TableSpec
        name, rows, dim, mean pooling and number of features of each table. Names differ.

    group : ProcessGroup, optional
        the ranks that share the tables; None is the default group.

    plan : ShardingPlan, optional
        which rank owns what; None calls :func:`tileweave.plan_sharding`.

    mode : str
        ``"sum"`` or ``"mean"``.

    dtype : torch.dtype
        dtype of the tables: float32, float16 or bfloat16.

    out_dtype : torch.dtype, optional
        dtype of what is sent and of y. None: ``dtype``, or that to which the module is converted.

    device : optional
        device of the tables.

    optimizer : str, optional
        None makes gradients for an optimizer of torch. ``"sgd"`` or ``"adagrad"``: backward
        updates the tables in place, so it cannot be combined with a GradScaler, gradient clipping
        or accumulation over batches. Row-wise Adagrad uses the mean of squares over the columns of
        the part. Not with tables of several features, whose gradients are summed before a step.

    learning_rate : float
        initial value of the buffer ``rate`` (fp32 [1]), which may be changed at any time.
        ``rate`` is not in checkpoints; ``reset_parameters`` sets it to ``learning_rate`` and
        moments to 0.

    epsilon : float
        added to the square root in Adagrad.

    sparse : bool
        gradients are COO tensors.

    divide_gradient : bool
        divide gradients by R, as for a loss that is a mean over ranks.

    Raises
    ------
    InputError
        if options do not fit, on every rank. For errors of a call see
        ``tileweave.distribute_indices`` and ``tileweave.embedding_bag_all_to_all``.

    Notes
    -----
    Compilers do not trace the exchange of indices, so a compiled module is not one full graph. With
    Inductor set ``reorder_for_peak_memory`` to False if ranks have different tables (guide to
    torch.compile).
    """

    rate: torch.Tensor

    @checks_types_first
    def __init__(
        self,
        tables: Sequence[TableSpec],
        *,
        group: Group | None = None,
        plan: ShardingPlan | None = None,
        mode: str = "sum",
        dtype: torch.dtype = torch.float32,
        out_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        optimizer: str | None = None,
        learning_rate: float = 0.01,
        epsilon: float = 1e-8,
        sparse: bool = False,
        divide_gradient: bool = False,
    ) -> None:
        super().__init__()
        _check_options(mode, dtype, out_dtype or dtype, optimizer, learning_rate, epsilon)
        self.group_name = name_of(group)
        self.rank, self.world_size = rank_and_size(self.group_name)
        self.plan = plan or plan_sharding(tables, self.world_size, dtype.itemsize)
        fits = self.plan.world_size == self.world_size and self.plan.tables == tuple(tables)
        require(
            fits,
            "a plan for other tables or ranks",
            "a plan made for these",
            "call tw.plan_sharding with these tables and the world size",
        )
        self.layout = self.plan.layout()
        self.features = [self.plan.features(rank) for rank in range(self.world_size)]
        self.num_features = sum(table.features for table in tables)
        self.mode, self.out_dtype = mode, out_dtype
        self.sparse, self.divide_gradient = sparse, divide_gradient
        names = [table.name for table in self.plan.tables]
        require(
            len({*names}) == len(names) and all(name and "." not in name for name in names),
            f"tables named {', '.join(map(repr, names))}",
            "different names without dots, which are keys of the state_dict",
            "rename tables; features that share a table are one TableSpec(..., features=n)",
        )
        shared = [table.name for table in self.plan.tables if table.features > 1]
        require(
            optimizer is None or not shared,
            f"optimizer {optimizer!r} with several features of {', '.join(map(repr, shared))}",
            "tables of one feature each",
            "leave the step to an optimizer of torch (optimizer=None), or make a module of its own "
            "for these tables",
        )
        self.embedding_bags = nn.Module()
        for shard in self.plan.of_rank(self.rank):
            table = self.plan.tables[shard.table]
            weight = torch.empty(table.rows, shard.dim, dtype=dtype, device=device)
            # not add_module, which refuses names that a module has as attributes, such as "type"
            bag = self.embedding_bags._modules.setdefault(table.name, nn.Module())
            assert bag is not None, "set above"
            bag.register_parameter(f"weight{self._suffix(shard)}", nn.Parameter(weight))
        # Tells a rank without tables whether the tables of others are trained. Not in checkpoints.
        self.anchor = (
            None
            if self.plan.of_rank(self.rank)
            else nn.Parameter(torch.zeros(0, dtype=dtype, device=device))
        )
        self.kind, self.epsilon = optimizer, epsilon
        self.dtype, self.learning_rate = dtype, learning_rate
        if optimizer is not None:
            self.register_buffer(
                "rate", torch.empty(1, dtype=torch.float32, device=device), persistent=False
            )
        for bag, suffix in self._parts() if optimizer == "adagrad" else []:
            rows = getattr(bag, f"weight{suffix}").shape[0]
            moment = torch.empty(rows, dtype=torch.float32, device=device)
            bag.register_buffer(f"moment{suffix}", moment)
        self.register_load_state_dict_post_hook(_follow_weights)
        self.reset_parameters()

    def _suffix(self, shard: Shard) -> str:
        """What names of a part end in: its first column, if it is not a whole table."""
        whole = shard.dim == self.plan.tables[shard.table].dim
        return "" if whole else f"_{shard.column}"

    def _parts(self) -> list[tuple[nn.Module, str]]:
        """The module and the suffix of each part of this rank, in the order of the plan."""
        tables = self.plan.tables
        return [
            (self.embedding_bags._modules[tables[s.table].name], self._suffix(s))  # type: ignore
            for s in self.plan.of_rank(self.rank)
        ]

    @property
    def optimizer(self) -> FusedOptimizer | None:
        """The optimizer that backward applies. ``rate`` and the moments are buffers."""
        if self.kind is None:
            return None
        self._refuse_parametrized("a fused step")
        rate, *moments = (getattr(owner, name) for owner, name, _ in self._optimizer_state())
        return FusedOptimizer(self.kind, rate, moments, self.epsilon)

    def _refuse_parametrized(self, what: str) -> None:
        """Refuse to write to parametrized weights: they are computed for each use, so it would be
        lost."""
        fits = not any(hasattr(module, "parametrizations") for module in self.modules())
        require(
            fits,
            f"{what} of parametrized tables",
            "plain parameters",
            "remove the parametrization, or use an optimizer of torch",
        )

    def _optimizer_state(self) -> list[tuple[nn.Module, str, float]]:
        """The buffers of the optimizer: module, name and initial value; users may register
        others."""
        if self.kind is None:
            return []
        parts = self._parts() if self.kind == "adagrad" else []
        rate: tuple[nn.Module, str, float] = (self, "rate", self.learning_rate)
        return [rate, *((bag, f"moment{suffix}", 0.0) for bag, suffix in parts)]

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> ShardedEmbeddingBag:
        """As in ``nn.Module``, but the buffers of the optimizer keep their dtype and values: only
        their device may change."""
        before = [(*state, getattr(*state[:2])) for state in self._optimizer_state()]
        super()._apply(fn, recurse)
        # also on a rank without tables
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        for owner, name, start, old in before:
            _move_state(owner, name, start, old, getattr(owner, name).device)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.pop(f"{prefix}anchor", None)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = (
            state_dict if self.anchor is None else {**state_dict, f"{prefix}anchor": self.anchor}
        )
        super()._load_from_state_dict(
            known, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        # the next hook follows weights to the device of the checkpoint
        self._assigned = local_metadata.get("assign_to_params_buffers", False)

    def weights(self) -> list[torch.Tensor]:
        """This rank's parts, in the order of the plan: parameters, or what replaces them
        (parametrizations, functional calls)."""
        return [getattr(bag, f"weight{suffix}") for bag, suffix in self._parts()]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize weights as ``nn.EmbeddingBag`` does, and the state of the optimizer. Use the
        same seed on all ranks before."""
        self._refuse_parametrized("reset_parameters")
        weights = self.weights()
        # also on a rank without tables, so that later draws are the same on all ranks
        seed = draw_seed(next(self.parameters()))
        for weight, shard in zip(weights, self.plan.of_rank(self.rank), strict=True):
            number = (shard.table << 20) + shard.column  # the same on whichever rank it is
            nn.init.normal_(weight, generator=generator_of(weight, seed, number))
        for owner, name, start in self._optimizer_state():
            getattr(owner, name).fill_(start)

    @checks_types
    @torch.no_grad()
    def load_tables(self, tables: Sequence[torch.Tensor]) -> None:
        """Copy this rank's parts from whole tables.

        Parameters
        ----------
        tables
            all tables [rows, dim], in the order of the plan.

        Raises
        ------
        InputError
            if number or shapes differ from the plan.
        """
        self._refuse_parametrized("load_tables")
        wanted = [(spec.rows, spec.dim) for spec in self.plan.tables]
        given = [tuple(table.shape) for table in tables]
        require(
            given == wanted,
            f"load_tables of {given}",
            f"{wanted}",
            "pass every table whole, in the order of the plan",
        )
        for weight, shard in zip(self.weights(), self.plan.of_rank(self.rank), strict=True):
            weight.copy_(tables[shard.table][:, shard.column : shard.column + shard.dim])

    @torch.no_grad()
    def whole_tables(self) -> list[torch.Tensor]:
        """Collective. All whole tables, on every rank; for checkpoints of small tables and for
        tests."""
        group, found = group_of(self.group_name), []
        device = self.device_and_dtype()[0]
        used = exchange_numbers(
            tuple(sorted({FLOATS.index(w.dtype) for w in self.weights()})), device, group
        )
        kinds = [FLOATS[number] for numbers in used for number in numbers]
        dtype = reduce(torch.promote_types, kinds) if kinds else self.dtype  # one for all ranks
        mine = dict(zip(self.plan.of_rank(self.rank), self.weights(), strict=True))
        for number, spec in enumerate(self.plan.tables):
            whole = torch.zeros(spec.rows, spec.dim, dtype=torch.float32, device=device)
            for shard, weight in mine.items():
                if shard.table == number:
                    whole[:, shard.column : shard.column + shard.dim] = weight
            dist.all_reduce(whole, group=group)
            found.append(whole.to(dtype))
        return found

    def device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        """Device and dtype of the tables. On a rank without tables: those it would have, on the
        device of the group if no parameter has one."""
        for weight in self.weights():
            return weight.device, weight.dtype
        if self.anchor is not None and not self.anchor.is_meta:
            return self.anchor.device, self.anchor.dtype
        if dist.get_backend(group_of(self.group_name)) == "gloo":
            return torch.device("cpu"), self.dtype
        return torch.device("cuda", torch.cuda.current_device()), self.dtype

    @checks_types
    def forward(
        self,
        lengths: torch.Tensor,
        values: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        leaving = begin_distribute_indices(
            lengths, values, self.features, weights=per_sample_weights, group=self.group_name
        )
        # the dtypes that lookups read; others are refused on every rank
        indices, offsets, weights = leaving.finish(INDEX_DTYPES)
        return self.lookup(
            indices, offsets, weights, lengths.numel() // self.num_features * self.world_size
        )

    @checks_types
    def lookup(
        self, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, batch: int
    ) -> torch.Tensor:
        """The lookup of what ``tileweave.distribute_indices`` returned. A train pipeline may call
        the two separately.

        Parameters
        ----------
        indices, offsets, weights
            as returned by ``tileweave.distribute_indices``.

        batch
            samples of all ranks.
        """
        shards = self.plan.of_rank(self.rank)
        # the same tensor for each feature of a table: autograd adds up its gradients
        tables = [
            weight
            for weight, shard in zip(self.weights(), shards, strict=True)
            for _ in range(self.plan.tables[shard.table].features)
        ]
        return embedding_bag_all_to_all(
            tables,
            indices,
            offsets,
            batch=batch,
            mode=self.mode,
            per_sample_weights=weights,
            layout=self.layout,
            out_dtype=self.out_dtype or self.dtype,
            gradient="sparse" if self.sparse else "dense",
            optimizer=self.optimizer,
            divide_gradient=self.divide_gradient,
            group=self.group_name,
            anchor=self.anchor,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.num_features} features of {len(self.plan.tables)} tables / "
            f"{self.world_size} ranks, "
            f"{self.layout.width} columns, mode={self.mode!r}"
        )


def _move_state(
    owner: nn.Module, name: str, start: float, old: torch.Tensor, device: torch.device
) -> None:
    """Set buffer ``name`` of ``owner`` to ``old`` on ``device``, or to its initial value if ``old``
    is a meta tensor, since no checkpoint has the rate."""
    new = torch.full_like(old, start, device=device) if old.is_meta else old.to(device)
    setattr(owner, name, new)


def _follow_weights(module: nn.Module, _keys: object) -> None:
    """After ``load_state_dict(assign=True)`` weights are on the device of the checkpoint: move what
    it does not have there, too."""
    assert isinstance(module, ShardedEmbeddingBag), "registered there"
    if not module._assigned:
        return
    device, anchor = module.device_and_dtype()[0], module.anchor
    if anchor is not None and anchor.is_meta:
        fresh = torch.zeros_like(anchor, device=device)
        module.anchor = nn.Parameter(fresh, requires_grad=anchor.requires_grad)
    for owner, name, start in module._optimizer_state():
        _move_state(owner, name, start, getattr(owner, name), device)


def _check_options(
    mode: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    optimizer: str | None,
    learning_rate: float,
    epsilon: float,
) -> None:
    require(mode in ("sum", "mean"), f"mode {mode!r}", '"sum" or "mean"', "pass one of these")
    fits = dtype in DTYPES and out_dtype in DTYPES
    require(
        fits,
        f"tables of {dtype}, results of {out_dtype}",
        "float32, float16 or bfloat16",
        "pass one of these",
    )
    fits = optimizer in (None, "sgd", "adagrad")
    require(fits, f"optimizer {optimizer!r}", 'None, "sgd" or "adagrad"', "pass one of these")
    fits = 0 <= learning_rate < math.inf and 0 <= epsilon < math.inf
    require(
        fits,
        f"learning_rate {learning_rate}, epsilon {epsilon}",
        "finite numbers, 0 at least",
        "pass such numbers",
    )
