"""Linear layers for tensor and sequence parallelism: ``torch.nn.Linear`` whose parameters are
sharded.

A column-parallel layer, an elementwise function and a row-parallel layer make a Megatron-style MLP
or attention. Both layers are initialized like the full ``nn.Linear``; ``from_linear`` takes the
shard of this rank from a full layer that every rank has.

Parameters are DTensors of the shape of the full layer, ``Shard(0)``, ``Shard(1)`` or
``Replicate()`` on the mesh of the group: checkpoints, optimizers and gradient clipping of torch
treat them as one tensor. Pass a dimension of a DeviceMesh as ``group`` to combine a layer with
FSDP2 on another one.

Use the same seed on all ranks before making layers: replicated parameters are then equal on all
ranks, and shards still differ.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear as multiply

from tileweave.errors import InputError, require
from tileweave.nn.shards import (
    ShardedModule,
    check_sizes,
    described,
    distributed,
    fits_weight,
    is_read_by,
    local,
    mesh_of,
    sharded,
)
from tileweave.ops.core.argument_types import checks_types, checks_types_first
from tileweave.ops.core.registry import Group, group_of, name_of
from tileweave.ops.core.replicated import copy_to_group
from tileweave.ops.matmul.all_gather_matmul import all_gather_matmul
from tileweave.ops.matmul.matmul_all_reduce import matmul_all_reduce
from tileweave.ops.matmul.matmul_reduce_scatter import matmul_reduce_scatter
from tileweave.ops.matmul.scaled import ALIGN, RECIPES
from tileweave.ops.matmul.scaled_training import linear as multiply_in_fp8


def under_autocast(*operands: Any) -> tuple[Any, ...]:
    """``operands`` (tensors or None) in the dtype of ``torch.autocast`` if it is enabled, as
    ``nn.Linear`` casts them; else as they are."""
    kind = operands[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return operands
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in operands)


def draw_seed(like: torch.Tensor) -> int | None:
    """A random number from the default generator of the device of ``like``; None for meta and fake
    tensors."""
    if like.is_meta or hasattr(like, "fake_mode"):
        return None
    # leaves room for the number that is added to it
    return int(torch.empty((), dtype=torch.int64, device=like.device).random_()) >> 1


def generator_of(shard: torch.Tensor, seed: int | None, number: int) -> torch.Generator | None:
    """The generator of shard ``number`` of a tensor that is drawn from ``seed``.

    From the default generator, ranks with the same seed would draw equal shards. Their gradients
    would be equal, too, so the shards would stay equal for ever.
    """
    return None if seed is None else torch.Generator(shard.device).manual_seed(seed + number)


def fill_shard(shard: torch.Tensor, bound: float, group_name: str) -> None:
    """Fill ``shard`` with values uniform in [-bound, bound], different on each rank."""
    generator = generator_of(shard, draw_seed(shard), dist.get_rank(group_of(group_name)))
    nn.init.uniform_(shard, -bound, bound, generator)


def _told(recipe: str | None) -> str:
    """The recipe of FP8 training in the repr of a layer."""
    return "" if recipe is None else f", fp8={recipe!r}"


def check_recipe(recipe: str | None) -> None:
    """Raise :class:`InputError` unless this is a recipe of FP8 training, or None."""
    require(
        recipe is None or recipe in RECIPES,
        f"fp8={recipe!r}",
        f"None, {', '.join(map(repr, RECIPES))}",
        "pass the name of a recipe of torchao",
    )


# Classes that compute what nn.Linear does.
_LINEAR = (
    "transformers.models.falcon.modeling_falcon.FalconLinear",
    "torch.nn.modules.linear.NonDynamicallyQuantizableLinear",  # of nn.MultiheadAttention
)
_TURNED = ("transformers.pytorch_utils.Conv1D",)  # its weight is [in, out]


def class_path(module: object) -> str:
    """Module and name of the class of ``module``."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def is_turned(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer with a weight [in, out], as of GPT-2."""
    return class_path(module) in _TURNED


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is an ``nn.Linear``, or of another class that computes the same."""
    return type(module) is nn.Linear or class_path(module) in (*_LINEAR, *_TURNED)


def name_features(module: Any) -> None:
    """Let a linear layer have the attributes ``in_features`` and ``out_features``."""
    if is_turned(module):
        module.in_features, module.out_features = module.weight.shape


class _RefusesAdapters:
    """The attribute of a layer that PEFT reads before it adds LoRA: shapes would not fit."""

    def __get__(self, layer: Any, _: type) -> None:
        if layer is not None and is_read_by("peft"):
            raise InputError(
                f"asked: LoRA around {layer.path or type(layer).__name__}, which is sharded; "
                "allowed: LoRA that was added before; remedy: add or load adapters first "
                "(get_peft_model, PeftModel.from_pretrained), then call tileweave.parallelize; or "
                "leave this layer out of target_modules"
            )
        raise AttributeError("_hf_tp_plan")


class ParallelLinear(ShardedModule, nn.Linear):
    """The common part of both layers."""

    _hf_tp_plan = _RefusesAdapters()

    # Which dimension of weight and bias is sharded; None: replicated.
    dims: ClassVar[tuple[int, int | None]]
    fp8: str | None = None  # the recipe of FP8 training
    path: str = ""  # in the model, for errors
    dim: int = 0  # of rows
    copies: int = 1  # how many consecutive ranks compute the same features
    turned: bool = False  # the weight is [in, out], as in Conv1D of transformers

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: Group | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        nn.Module.__init__(self)
        check_sizes("a layer", 0, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self._join(group)
        shape = self._own_shape()
        weight = torch.empty(shape, device=device, dtype=dtype)
        mesh = mesh_of(group, weight.device)
        weight_at, bias_at = self._placements()
        self.weight = sharded(weight, mesh, weight_at)
        self.bias = None
        if bias:
            empty = torch.empty(shape[0], device=device, dtype=dtype)
            self.bias = sharded(empty, mesh, bias_at)
        self.reset_parameters()

    def _join(self, group: Group | None) -> None:
        """Set the group, and check that the sharded features are a multiple of its size."""
        self.group_name = name_of(group)
        self.world_size = dist.get_world_size(group_of(self.group_name))
        name = ("out_features", "in_features")[self.dims[0]]
        features = getattr(self, name)
        require(
            features * self.copies % self.world_size == 0,
            f"{name}={features} over {self.world_size} ranks",
            "a multiple of the world size",
            "pad the layer or choose another group",
        )

    def _own_shape(self) -> list[int]:
        """The shape of the weight that this rank multiplies by."""
        shape, dim = [self.out_features, self.in_features], self.dims[0]
        shape[dim] = shape[dim] * self.copies // self.world_size
        return shape

    @checks_types
    def train_in_fp8(self, recipe: str | None) -> Any:
        """Quantise operands by this recipe of FP8 training from now on (None: do not), and return
        the layer."""
        if recipe is not None:
            rows, depth = self._own_shape()
            check_recipe(recipe)
            require(
                rows % ALIGN == 0 and depth % ALIGN == 0,
                f"fp8={recipe!r} with a weight {(rows, depth)} of each rank",
                f"multiples of {ALIGN}, which FP8 tensor cores need",
                "leave this layer in 16 bits",
            )
            require(
                not getattr(self, "save_gathered", False),
                f"fp8={recipe!r} with save_gathered=True",
                "one of them",
                "drop save_gathered: gather(x) is FP8",
            )
        self.fp8 = recipe
        return self

    def parts(self) -> tuple[Any, Any]:
        """This rank's shards of weight and bias, as plain tensors."""
        w = local(self.weight)
        w = w.t() if self.turned else w
        dim = self.dims[0]
        if w.shape[dim] * self.world_size != (self.out_features, self.in_features)[dim]:
            raise InputError(
                f"asked: {self.path or type(self).__name__} with a weight {tuple(w.shape)}; "
                f"allowed: this rank's part of {(self.out_features, self.in_features)}, a DTensor; "
                "remedy: give functional_call the parameters of the sharded model, not those of "
                "the whole one"
            )
        return w, local(self.bias)

    def require_rows(self, x: torch.Tensor) -> None:
        """Raise :class:`InputError` if x has no dimension ``dim`` of rows."""
        require(
            self.dim == 0 or x.dim() > self.dim + 1,
            lambda: (
                f"{self.path or type(self).__name__} of x {tuple(x.shape)}, whose rows are in "
                f"dimension {self.dim}"
            ),
            "x [B, S, ..., K]",
            "keep that dimension, without flatten() or view() before this layer; or make the layer "
            "with dim=0, or the model with sequence_parallel=False",
        )

    def _placements(self) -> tuple[Any, Any]:
        from torch.distributed.tensor import Replicate, Shard

        weight, bias = self.dims
        return Shard(weight), Replicate() if bias is None else Shard(bias)

    @classmethod
    def take_over(
        cls, linear: nn.Module, group: Group | None, source: int | None, **options: Any
    ) -> Any:
        """Make ``linear`` this layer in place; other modules may hold it.

        ``source``: the rank whose values are taken; None: each rank has the full layer.
        """
        require(
            is_linear(linear),
            f"a shard of {type(linear).__name__}",
            "torch.nn.Linear itself: subclasses may compute something else, as quantised ones do",
            "leave this module out of the plan",
        )
        layer: Any = linear
        name_features(layer)
        kind, layer.turned, layer.__class__ = type(linear), is_turned(linear), cls
        for name, value in options.items():
            setattr(layer, name, value)
        try:
            layer._join(group)
        except InputError:
            layer.__class__ = kind
            raise
        mesh = mesh_of(group, layer.weight.device)
        for name, placement in zip(("weight", "bias"), layer._placements(), strict=True):
            whole = getattr(linear, name)
            if whole is None:
                continue
            turns = layer.turned and name == "weight"
            given = nn.Parameter(whole.detach().t().contiguous()) if turns else whole
            part = distributed(given, mesh, placement, source)
            if turns:  # operators read rows of [out, in], so those stay next to each other
                part = nn.Parameter(part.detach().t(), whole.requires_grad)
            setattr(layer, name, part)
        return layer

    @classmethod
    def _from(cls, linear: nn.Linear, group: Group | None, **options: Any) -> Any:
        copied = nn.Linear(linear.in_features, linear.out_features, False, device="meta")
        copied.weight, copied.bias = linear.weight, linear.bias
        return cls.take_over(copied.train(linear.training), group, None, **options)

    def reset_parameters(self) -> None:
        """Initialize like ``nn.Linear.reset_parameters`` of the full layer, whose ``in_features``
        give the bound."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
        with torch.no_grad():
            fill_shard(local(self.weight), bound, self.group_name)
            if self.bias is not None and self.dims[1] is not None:
                fill_shard(local(self.bias), bound, self.group_name)
            elif self.bias is not None:
                nn.init.uniform_(local(self.bias), -bound, bound)


class ColumnParallelLinear(ParallelLinear):
    """``gather(x) @ weight.T + bias``. Output features are sharded over the group.

    =======  ============================  ===================================================
    weight   [out_features, in], Shard(0)  each rank has out_features / R rows
    bias     [out_features], Shard(0)      or None
    x        [m, ..., in]                  this rank's rows (m = M / R); all with gather=False
    y        [M, ..., out_features / R]    all rows, this rank's features
    =======  ============================  ===================================================

    Parameters
    ----------
    in_features : int
        input features of the full layer.

    out_features : int
        output features of the full layer, a multiple of R.

    bias : bool
        whether the layer has a bias.

    group : ProcessGroup, DeviceMesh of one dimension, or str, optional
        the ranks that share the layer; None is the default group.

    device : torch.device, optional
        device of the parameters, as in ``nn.Linear``.

    dtype : torch.dtype, optional
        dtype of the parameters.

    gather : bool
        True: rows of x are sharded, and gathered (sequence parallelism). False: x is the same on
        every rank, nothing is sent in forward, and the gradient of x is summed over ranks
        (``tileweave.copy_to_group``).

    dim : int
        with ``gather``, the dimension of x along which rows are gathered: 0, or 1 for [B, S, H]
        (``gather_dim`` of ``tileweave.all_gather_matmul``).

    save_gathered : bool
        keep gather(x) for backward, which takes R times the memory of x, instead of gathering it
        again.

    fp8 : str, optional
        train in FP8 by torchao's recipe of this name, ``"rowwise"`` or ``"rowwise_with_gw_hp"``:
        operands are quantised in each call, parameters stay as they are
        (``quantize`` of ``tileweave.all_gather_matmul``).

    Raises
    ------
    InputError
        if ``out_features`` is not a multiple of R, or x does not fit.
    """

    dims = (0, 0)

    @checks_types_first
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        gather: bool = True,
        dim: int = 0,
        save_gathered: bool = False,
        fp8: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, group, device, dtype)
        self.gather, self.dim, self.save_gathered = gather, dim, save_gathered
        self.train_in_fp8(fp8)

    @classmethod
    @checks_types_first
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: Group | None = None,
        gather: bool = True,
        dim: int = 0,
        save_gathered: bool = False,
        fp8: str | None = None,
    ) -> ColumnParallelLinear:
        """This rank's shard of a full ``nn.Linear``, that every rank has. Options: of the class."""
        options = dict(gather=gather, dim=dim, save_gathered=save_gathered)
        return cls._from(linear, group, **options).train_in_fp8(fp8)

    def parts(self) -> tuple[Any, Any]:
        """As of :class:`ParallelLinear`. With copies both are views of what every rank has, and
        their gradients are summed over ranks."""
        if self.copies == 1:
            return super().parts()
        own, rank = self._own_shape()[0], dist.get_rank(group_of(self.group_name))
        begin = rank // self.copies * own
        w = copy_to_group(local(self.weight), self.group_name)
        w = (w.t() if self.turned else w)[begin : begin + own]
        if self.bias is None:
            return w, None
        return w, copy_to_group(local(self.bias), self.group_name)[begin : begin + own]

    def _placements(self) -> tuple[Any, Any]:
        from torch.distributed.tensor import Replicate

        return super()._placements() if self.copies == 1 else (Replicate(), Replicate())

    @checks_types
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x, w, bias = under_autocast(input, *self.parts())
        if not self.gather:
            require(
                fits_weight(x, w),
                lambda: f"{self.path or type(self).__name__} of {described(x)}",
                f"x [..., {self.in_features}] like its weight, {described(w)}",
                "pass such an x",
            )
            whole = copy_to_group(x, self.group_name)
            if self.fp8 is not None:
                return multiply_in_fp8(whole, w, bias, self.fp8)
            return multiply(whole, w, bias)
        self.require_rows(x)
        keep = self.save_gathered and torch.is_grad_enabled()
        y = all_gather_matmul(
            x,
            w,
            bias,
            group=self.group_name,
            return_gathered=keep,
            gather_dim=self.dim,
            quantize=self.fp8,
        )
        return y[0] if keep else y

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, "
            f"out_features={self.out_features} / {self.world_size} ranks, "
            f"bias={self.bias is not None}, gather={self.gather}, dim={self.dim}, "
            f"save_gathered={self.save_gathered}{_told(self.fp8)}"
            + (f", copies={self.copies}" if self.copies > 1 else "")
        )


class RowParallelLinear(ParallelLinear):
    """``sum over ranks of x @ weight.T, plus bias``. Input features are sharded over the group.

    =======  ============================  ===================================================
    weight   [out, in_features], Shard(1)  each rank has in_features / R columns
    bias     [out], Replicate()            or None; its gradient is the same on every rank, too
    x        [M, ..., in_features / R]     all rows, this rank's features
    y        [M / R, ..., out]             this rank's rows; all rows with ``scatter=False``
    =======  ============================  ===================================================

    Parameters
    ----------
    in_features : int
        input features of the full layer, a multiple of R.

    out_features : int
        output features of the full layer.

    bias : bool
        whether the layer has a bias. It is replicated and must be equal on all ranks: use the same
        seed on all ranks before making the layer, load a state_dict, or use :meth:`from_linear`.

    group : ProcessGroup, DeviceMesh of one dimension, or str, optional
        the ranks that share the layer; None is the default group.

    device : torch.device, optional
        device of the parameters, as in ``nn.Linear``.

    dtype : torch.dtype, optional
        dtype of the parameters.

    scatter : bool
        True calls ``matmul_reduce_scatter``, for sequence parallelism. False calls
        ``matmul_all_reduce``; backward then assumes that the gradient of y is the same on every
        rank. The layer before it is a ``ColumnParallelLinear(gather=False)``.

    dim : int
        with ``scatter``, the dimension of y along which rows are scattered: 0, or 1 for [B, S, H]
        (``scatter_dim`` of ``tileweave.matmul_reduce_scatter``).

    fp8 : str, optional
        train in FP8 by torchao's recipe of this name, ``"rowwise"`` or ``"rowwise_with_gw_hp"``:
        operands are quantised in each call, parameters stay as they are
        (``quantize`` of ``tileweave.matmul_reduce_scatter``).

    Raises
    ------
    InputError
        if ``in_features`` is not a multiple of R, or x does not fit.
    """

    dims = (1, None)

    @checks_types_first
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scatter: bool = True,
        dim: int = 0,
        fp8: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, group, device, dtype)
        self.scatter, self.dim = scatter, dim
        self.train_in_fp8(fp8)

    @classmethod
    @checks_types_first
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: Group | None = None,
        scatter: bool = True,
        dim: int = 0,
        fp8: str | None = None,
    ) -> RowParallelLinear:
        """This rank's shard of a full ``nn.Linear``, that every rank has. Options: of the class."""
        return cls._from(linear, group, scatter=scatter, dim=dim).train_in_fp8(fp8)

    @checks_types
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x, w, bias = under_autocast(input, *self.parts())
        if x.dim() == 0 or x.shape[-1] != w.shape[1]:
            self._refuse(x)
        if not self.scatter:
            y = matmul_all_reduce(x, w, bias, group=self.group_name, quantize=self.fp8)
            assert isinstance(y, torch.Tensor), "without a norm there is one result"
            return y
        self.require_rows(x)
        return matmul_reduce_scatter(
            x, w, bias, group=self.group_name, scatter_dim=self.dim, quantize=self.fp8
        )

    def _refuse(self, x: torch.Tensor) -> None:
        raise InputError(
            f"asked: {self.path or type(self).__name__} of x {tuple(x.shape)}; allowed: this "
            f"rank's {self.in_features // self.world_size} of {self.in_features} features, as "
            "column-parallel layers make them; remedy: shard the layers before this one, too "
            '("colwise"), or leave this one whole'
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features} / {self.world_size} ranks, "
            f"out_features={self.out_features}, bias={self.bias is not None}, "
            f"scatter={self.scatter}, dim={self.dim}{_told(self.fp8)}"
        )
