"""torchao's FP8 training: layers that ``convert_to_float8_training`` made, split over ranks.

>>> from torchao.float8 import Float8LinearConfig, convert_to_float8_training
>>> convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"), ...)
>>> tileweave.integrations.torchao.parallelize(model, mesh)

Layers become those of ``tileweave.nn``, with the recipe of their config (``fp8=``). Tested with
torchao 0.18.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from tileweave.errors import InputError, require
from tileweave.nn.linear import ParallelLinear
from tileweave.ops.core.argument_types import checks_types_first
from tileweave.ops.core.registry import Group
from tileweave.ops.matmul.scaled import RECIPES
from tileweave.parallel.whole_model import parallelize as _parallelize

try:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear
except ImportError as error:
    raise InputError(
        "asked: tileweave.integrations.torchao; allowed: with torchao, tested with 0.18; "
        f"remedy: pip install torchao ({error})"
    ) from error


__all__ = ["parallelize"]


def recipe_of(path: str, layer: Any) -> str:
    """The recipe of FP8 training that the config of a ``Float8Linear`` has; raises
    :class:`InputError` for other configs. Whether tensor cores keep sums is not compared."""
    config, names = layer.config, []
    for name in RECIPES:
        known = Float8LinearConfig.from_recipe_name(name)
        like = replace(
            known,
            emulate=config.emulate,
            gemm_config_output=config.gemm_config_output,
            gemm_config_grad_input=config.gemm_config_grad_input,
            gemm_config_grad_weight=config.gemm_config_grad_weight,
        )
        names += [name] if like == config else []
    require(
        bool(names),
        f"{path} with {config}",
        f"Float8LinearConfig.from_recipe_name of {', '.join(map(repr, RECIPES))}",
        "convert the model by one of these recipes",
    )
    return names[0]


@checks_types_first
def parallelize(
    model: nn.Module, mesh: Group | None = None, plan: Any = "auto", **options: Any
) -> nn.Module:
    """:func:`tileweave.parallelize` of a model with layers of torchao's FP8 training.

    Parameters
    ----------
    model : nn.Module
        As ``tileweave.parallelize`` takes it.

    mesh : DeviceMesh, process group or str, optional
        The ranks.

    plan : dict or str
        All ``Float8Linear`` must be in it.

    **options : Any
        As of ``tileweave.parallelize``.

    Returns
    -------
    model : nn.Module
        The same object.

    Raises
    ------
    InputError
        A layer has another recipe, or ``tileweave.parallelize`` refuses the model: nothing is
        changed then. Or a layer is not in the plan, or with ``sequence_parallel`` shares a gather,
        which sends no FP8: the model is split then, and cannot be used.
    """
    layers: dict[str, Any] = {
        path: m for path, m in model.named_modules() if isinstance(m, Float8Linear)
    }
    recipes = {path: recipe_of(path, layer) for path, layer in layers.items()}
    for layer in layers.values():
        layer.__class__ = nn.Linear
    try:
        _parallelize(model, mesh, plan, **options)
    except InputError:
        for layer in layers.values():
            if type(layer) is nn.Linear:
                layer.__class__ = Float8Linear
        raise
    for path, recipe in recipes.items():
        split: Any = model.get_submodule(path)
        require(
            isinstance(split, ParallelLinear),
            f"FP8 training of {path}, which the plan does not split",
            "layers of the plan",
            "leave it out by module_filter_fn of convert_to_float8_training",
        )
        split.train_in_fp8(recipe)
    return model
