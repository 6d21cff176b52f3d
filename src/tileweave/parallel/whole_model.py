"""parallelize: shard the linear layers of a model over a mesh, by plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tileweave.errors import InputError, require
from tileweave.nn.replicated import replicate
from tileweave.nn.shards import mesh_of
from tileweave.ops.core.registry import Group, group_of, name_of
from tileweave.ops.core.replicated import gather_parts, own_part
from tileweave.parallel.fused import INTERLEAVED, FusedLayer, check_parts, class_path, split
from tileweave.parallel.plans import (
    COLUMN,
    OWN_HEADS,
    ROW,
    SUMS,
    WHOLE,
    Block,
    blocks_of,
    matched,
    of_transformers,
    recognise,
    split_fused,
)
from tileweave.parallel.saving import save_whole
from tileweave.parallel.shared_input import share_input
from tileweave.parallel.styles import Colwise, Rowwise, SequenceParallel

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)  # of blocks
Styles = dict[str, str | ParallelStyle]


def parallelize(
    model: nn.Module,
    mesh: Group | None = None,
    plan: str | Styles = "auto",
    *,
    sequence_parallel: bool = False,
    sequence_dim: int = 1,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Shard the linear layers of ``model`` over the ranks of ``mesh``, in place (tensor
    parallelism).

    All parameters become DTensors: sharded ones of linear layers in the plan, replicated ones of
    all other modules. Optimizers, ``clip_grad_norm_``, ``torch.distributed.checkpoint`` and FSDP2
    (on another dimension of the mesh) work as with the styles of torch. Works under
    ``torch.compile(fullgraph=True)``.

    Layers that take the input of one attention or MLP (q, k, v; gate, up) share one gather, or one
    sum of gradients. A layer that computes several projections, such as ``qkv_proj`` or
    ``gate_up_proj``, becomes a layer for each, where its module is known to compute heads or
    features one by one (transformers' Phi-3 and GLM, any gated MLP that passes a trial); others are
    refused, or take ``Colwise(parts=...)``. The state_dict keeps the names and shapes of ``model``.
    ``save_pretrained`` of transformers writes whole weights; all ranks must call it.

    Parameters
    ----------
    model : nn.Module
        The same model on every rank.

    mesh : DeviceMesh, ProcessGroup or str, optional
        A mesh of one dimension, or one with a dimension named "tp"; or a group. None: the default
        group.

    plan : "auto" or dict
        "auto": the plan of a transformers model, else layers are recognised by their names, such as
        ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` and ``gate_proj``, ``up_proj``,
        ``down_proj``.

        A dict gives a style for each pattern of module paths (``fnmatch``, such as
        ``"layers.*.wq"``): "colwise", "rowwise", "sequence_parallel", or a ``ParallelStyle`` of
        ``tileweave.parallel`` or torch.

    sequence_parallel : bool
        False: activations between layers are the same on every rank, and each row-parallel layer
        ends in an all-reduce. True: between layers each rank has its rows; they are gathered for
        attention and MLP, and scattered after them, fused with the matmuls. The first block of a
        list (``ModuleList``, ``ModuleDict``, ``Sequential``) takes this rank's rows of its input,
        the output of the last one is gathered. Without such a list the model takes and returns this
        rank's rows.

    sequence_dim : int
        With ``sequence_parallel``: the dimension of rows, 1 for activations [batch, sequence,
        hidden]. Its size must be a multiple of the number of ranks.

    src_data_rank : int, optional
        The rank of the mesh whose parameters are taken. None: ranks have equal parameters, and
        nothing is sent.

    Returns
    -------
    model : nn.Module
        The same object.

    Raises
    ------
    InputError
        The plan does not fit, with the path of the module; nothing is changed then.
    """
    flat = _one_dimension(mesh)
    name = name_of(flat)
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    size = dist.get_world_size(group_of(name))
    styles, blocks, fused = _styles(model, plan, size)
    at = sequence_dim if sequence_parallel else None
    _check(model, styles, [*blocks, *(Block(f.path, (f.name,), f.row) for f in fused)], size)
    for layer in fused:
        _check_fused(model, layer, size)
    for layer in fused:
        split(model, layer, size)
        blocks.append(Block(layer.path, layer.columns, layer.row))
        styles.update(blocks[-1].paths())
    over = mesh_of(flat, device)
    for path, style in styles.items():
        made = _style(style, at)
        made.src_data_rank = src_data_rank
        _replace(model, path, made._apply(model.get_submodule(path), over))
    for block in blocks:
        share_input(model.get_submodule(block.path), block.path, block.columns)
    rows = _own_rows(model, styles, name, sequence_dim) if sequence_parallel else []
    known: dict[nn.Parameter, nn.Parameter] = {}
    for part in rows:  # all that is not sharded sees own rows, or own heads
        replicate(part, over, True, known, src_data_rank)
    for block in blocks:
        for child, part in model.get_submodule(block.path).named_children():
            if child in OWN_HEADS:
                replicate(part, over, True, known, src_data_rank)
    replicate(model, over, False, known, src_data_rank)
    save_whole(model)
    return model


def _one_dimension(mesh: Group | None) -> Group | None:
    names = mesh.mesh_dim_names or () if isinstance(mesh, DeviceMesh) else ()
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 1 and "tp" in names:
        return mesh["tp"]
    return mesh


def _styles(
    model: nn.Module, plan: str | Styles, size: int
) -> tuple[Styles, list[Block], list[FusedLayer]]:
    """The style of each module by path, the modules whose layers share their input, and the layers
    that are to be split before."""
    if isinstance(plan, dict):
        styles = matched(model, plan)
        fused = split_fused(model, styles, size, None)
        return styles, blocks_of(styles), fused
    require(plan == "auto", f"plan={plan!r}", '"auto" or a dict', "pass one of them")
    given = of_transformers(model)
    if given is None:
        blocks, fused = recognise(model, size)
        return {path: kind for b in blocks for path, kind in b.paths().items()}, blocks, fused
    known = (COLUMN, ROW, *SUMS, *WHOLE)
    for pattern, style in given.items():
        require(
            style in known,
            f"the plan of {type(model).__name__}, which has {pattern!r}: {style!r}",
            ", ".join(known),
            "pass plan={...} without it, or load with tileweave.integrations.transformers",
        )
    styles = matched(model, {p: s for p, s in given.items() if s not in WHOLE})
    fused = split_fused(model, styles, size, given)
    return styles, blocks_of(styles), fused


def _style(style: str | ParallelStyle, sequence_dim: int | None) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style == COLUMN:
        return Colwise(sequence_dim=sequence_dim)
    if style == ROW:
        return Rowwise(sequence_dim=sequence_dim)
    return SequenceParallel()


def _uses(model: nn.Module) -> Counter[Any]:
    """How many modules have each parameter."""
    return Counter(p for m in model.modules() for p in m._parameters.values() if p is not None)


def _check(model: nn.Module, styles: Styles, blocks: list[Block], size: int) -> None:
    """Raise for what the plan cannot do, before anything is changed."""
    uses = _uses(model)
    for path, style in styles.items():
        module: Any = model.get_submodule(path)
        if isinstance(style, str):
            allowed = (COLUMN, ROW, *SUMS)
            require(style in allowed, f"{path}: style {style!r}", ", ".join(allowed), "pass one")
        kinds = ("out_features",) if style == COLUMN or isinstance(style, Colwise) else ()
        if style == ROW or isinstance(style, Rowwise):
            kinds = ("in_features",)
        if isinstance(style, Colwise) and style.parts is not None:
            check_parts(path, module, style.parts, size)
        for features in kinds:
            require(
                type(module) is nn.Linear,
                f"{path}, a {type(module).__name__}",
                "torch.nn.Linear itself: a subclass may compute something else, as quantised ones "
                "do",
                "parallelize before that module is replaced, put an nn.Linear with the same result "
                "in its place, or pass a plan without it",
            )
            require(
                uses[module.weight] == 1,
                f"{path}, whose weight another module has, too",
                "a weight of its own",
                "pass a plan without it: shared weights stay whole",
            )
            require(
                getattr(module, features) % size == 0,
                f"{path}: {features}={getattr(module, features)} over {size} ranks",
                "a multiple of the world size",
                "choose fewer ranks, or pass a plan without it",
            )
    for block in blocks:
        _check_block(model.get_submodule(block.path), block, size)


def _check_fused(model: nn.Module, layer: FusedLayer, size: int) -> None:
    module: Any = model.get_submodule(layer.path)
    paths = [f"{layer.path}.{name}" if layer.path else name for name in (layer.name, layer.row)]
    uses = _uses(model)
    for path in paths:
        linear: Any = model.get_submodule(path)
        require(
            type(linear) is nn.Linear and uses[linear.weight] == 1,
            f"{path}, a {type(linear).__name__}",
            "torch.nn.Linear itself, with a weight of its own",
            "parallelize before that module is replaced, put an nn.Linear with the same result in "
            "its place, or pass a plan without it",
        )
    head = getattr(module, "head_dim", 1)
    check_parts(paths[0], model.get_submodule(paths[0]), layer.sizes, size, head)


def _check_block(module: nn.Module, block: Block, size: int) -> None:
    head = getattr(module, "head_dim", getattr(module, "head_size", None))
    if class_path(module) in INTERLEAVED:
        head = 3 * head if head else None
    for name in block.columns:
        features = getattr(module, name).out_features
        require(
            not isinstance(head, int) or features // size % head == 0,
            f"{block.path}.{name}: {features} features, heads of {head}, over {size} ranks",
            "whole heads on every rank",
            "choose fewer ranks, or pass a plan without this attention",
        )
    for name, child in module.named_children():
        # its input is this rank's heads or features only, or all of them: that decides whether
        # gradients are partial sums
        unknown = any(True for _ in child.parameters())
        if unknown and name not in (*block.columns, block.row, *OWN_HEADS):
            raise InputError(
                f"asked: a plan for {block.path}, which has {block.path}.{name} with "
                f"parameters; allowed: {', '.join((*block.columns, block.row, *OWN_HEADS))}; "
                "remedy: give it a style with plan={...}, tw.parallel.SequenceParallel() if each "
                "rank has only a part of its input"
            )


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    if module is not model.get_submodule(path):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)


def _own_rows(model: nn.Module, styles: Styles, group_name: str, dim: int) -> list[nn.Module]:
    """Shard rows where the blocks of a list begin, and gather them where it ends. Return the
    modules whose activations have this rank's rows."""
    lists = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, CONTAINERS)
        and any(p.startswith(f"{path}.") and p.count(".") >= path.count(".") + 2 for p in styles)
    }
    outer = [
        list(module.children())
        for path, module in lists.items()
        if not any(path.startswith(f"{other}.") for other in lists)
    ]
    if not outer:
        return [model]
    for blocks in outer:

        def begin(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if args:
                return (own_part(args[0], dim, group_name), *args[1:]), kwargs
            key = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
            return args, {**kwargs, key: own_part(kwargs[key], dim, group_name)}

        def end(module: nn.Module, args: tuple[Any, ...], y: Any) -> Any:
            if isinstance(y, torch.Tensor):
                return gather_parts(y, dim, group_name)
            return (gather_parts(y[0], dim, group_name), *y[1:])

        blocks[0].register_forward_pre_hook(begin, with_kwargs=True)
        blocks[-1].register_forward_hook(end)
    return [block for blocks in outer for block in blocks]
