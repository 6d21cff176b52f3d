"""parallelize: shard the linear layers of a model over a mesh, by plan."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from tileweave.errors import InputError, require
from tileweave.nn.linear import ParallelLinear, name_features
from tileweave.nn.replicated import make_replicated, plain_in_parents
from tileweave.nn.shards import mesh_of
from tileweave.ops.core.argument_types import checks_types_first
from tileweave.ops.core.registry import Group, group_of, name_of
from tileweave.parallel.adapters import shard_lora, take_base_layers
from tileweave.parallel.attentions import known_attention
from tileweave.parallel.check_rows import (
    check_own_rows,
    counts_rows,
    has_own_rows,
    routed_parts,
)
from tileweave.parallel.checks import (
    attributes_to_share,
    check_between,
    check_block,
    check_fused,
    check_hooks,
    check_no_wrapper,
    check_styles,
    counts_heads,
)
from tileweave.parallel.experts import experts_of, is_described
from tileweave.parallel.fused import FusedLayer, split
from tileweave.parallel.gathered import gather_outputs
from tileweave.parallel.heads import Form, Heads, take_own_heads
from tileweave.parallel.multihead import TakenApart, check_whole
from tileweave.parallel.own_rows import AllRows, shard_rows
from tileweave.parallel.own_shards import shard_own
from tileweave.parallel.plans import (
    BY_HEAD,
    COLUMN,
    CONTAINERS,
    EXPERTS,
    HAS_BY_HEAD,
    LATENT,
    OWN_HEADS,
    ROW,
    STACKED,
    SUMS,
    UNTOUCHED,
    WHOLE,
    Block,
    block_of,
    blocks_of,
    is_column,
    is_row,
    is_summed,
    matched,
    of_transformers,
    recognise,
    split_fused,
    take_latent,
)
from tileweave.parallel.same_numbers import check_numbers
from tileweave.parallel.saving import save_whole
from tileweave.parallel.sharded_model import watch_model
from tileweave.parallel.shared_input import share_input
from tileweave.parallel.styles import Colwise, Experts, Rowwise, SequenceParallel
from tileweave.parallel.trial import Parts, Tried, modules_to_try, try_made_up_input, watch

_LOG = logging.getLogger("tileweave")
Styles = dict[str, str | ParallelStyle]


@checks_types_first
def parallelize(
    model: nn.Module,
    mesh: Group | None = None,
    plan: str | Styles = "auto",
    *,
    sequence_parallel: bool = False,
    sequence_dim: int = 1,
    src_data_rank: int | None = 0,
    check: bool = True,
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
    features one by one (in transformers Phi-3, GLM, GPT-2, BLOOM, Falcon, MPT and others), or where
    a trial shows it, as for the attentions of nanoGPT, timm and gpt-fast; others are refused, or
    take ``Colwise(parts=...)``. torch's ``nn.MultiheadAttention`` is sharded by heads, too, unless
    it has ``add_bias_kv``, ``add_zero_attn``, ``kdim`` or ``vdim``. With fewer heads of keys and
    values than ranks, ranks share a head. Attributes of an attention with the number of heads, or
    of their features, become those of one rank, if a trial shows that they are no more; so does the
    number of features of its input, which a forward may take for those of all heads. Stacked
    experts of transformers are sharded by expert: tokens are sent to them. Linear layers outside of
    the blocks, such as the head of a language model, keep whole weights; where it is predicted to
    be faster, each rank computes its own output features, and the features of all are gathered. The
    state_dict keeps the names and shapes of ``model``. ``save_pretrained`` of transformers writes
    whole weights; all ranks must call it.

    Parameters
    ----------
    model : nn.Module
        The same model on every rank.

    mesh : DeviceMesh, ProcessGroup or str, optional
        A mesh of one dimension, or one with a dimension named "tp"; or a group. None: the default
        group.

    plan : "auto" or dict
        "auto": the plan of a transformers model, else attentions are recognised by the names of
        their layers for queries, keys and values, such as ``q_proj``, ``W_q``, ``to_q``,
        ``queries``, and MLPs by their names, such as ``gate_proj``, ``up_proj``, ``down_proj``, or
        by a trial, if they have two linear layers and nothing else between them than what computes
        features one by one. What a check of such a guess does not pass stays whole on every rank.

        A dict gives a style for each pattern of module paths (``fnmatch``, such as
        ``"layers.*.wq"``): "colwise", "rowwise", "sequence_parallel" (its input is a part: own
        rows, heads or features, and gradients of its parameters are summed over ranks),
        "replicated" (its input is whole), "experts", or a ``ParallelStyle`` of
        ``tileweave.parallel`` or torch.

    sequence_parallel : bool
        False: activations between layers are the same on every rank, and each row-parallel layer
        ends in an all-reduce. True: between layers each rank has its rows; they are gathered for
        attention and MLP, and scattered after them, fused with the matmuls. In a list of blocks
        (``ModuleList``, ``ModuleDict``, ``Sequential``) the first one with layers of the plan takes
        this rank's rows of its first argument, the output of the last one is gathered. Gradients of
        its other arguments are summed over ranks. Layers outside of lists see all rows, and take
        the all-reduce form. Without a list the model takes and returns this rank's rows. With the
        plan "auto", a module with layers that are not in the plan takes all rows on every rank,
        which costs a gather; so does an attention with a norm in it that takes the number of rows
        from its input. A warning has the path.

    sequence_dim : int
        With ``sequence_parallel``: the dimension of rows, 1 for activations [batch, sequence,
        hidden]. Its size must be a multiple of the number of ranks.

    src_data_rank : int, optional
        The rank of the mesh whose parameters are taken. None: ranks have equal parameters, and
        nothing is sent.

    check : bool
        Try each module around sharded layers, with numbers in place of their outputs: whether each
        rank computes its part of the heads or features from that part. Modules that take one tensor
        are tried at once, others in their first call without ``torch.compile``; those that cannot
        be tried (with a cache, for instance) or that count heads by attributes are not. Also refuse
        hooks that change features or rows of one rank, and dropout whose random numbers differ
        between ranks. False: none of these checks.

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
    require(
        src_data_rank is None or 0 <= src_data_rank < size,
        f"src_data_rank={src_data_rank}",
        f"a rank of the mesh, 0 to {size - 1}, or None",
        "pass the rank that has the weights",
    )
    check_no_wrapper(model)
    for module in model.modules():
        name_features(module)
    at = sequence_dim if sequence_parallel else None
    with TakenApart(model) as apart:
        found = _planned(model, plan, size, check, at)
        apart.sharded.update(layer.path for layer in found.fused)
    styles, blocks, heads = found.styles, found.blocks, found.heads
    outer, all_rows = found.outer, found.all_rows
    for layer in found.fused:
        split(model, layer, size)
        blocks.append(replace(block_of(layer), columns=layer.columns))
        styles.update(blocks[-1].paths())
    over = mesh_of(flat, device)
    # styles of whole modules come after those of the linear layers in them
    for path, style in sorted(styles.items(), key=lambda entry: is_summed(entry[1])):
        if style in UNTOUCHED:
            continue
        dim = at
        if path.startswith(tuple(f"{path}." for path in all_rows)) or not found.by_row(path):
            dim = None
        elif path.startswith(found.routed):  # rows of any order there, maybe flattened
            dim = 0
        made = _style(style, dim, heads.shared.get(path, 1))
        made.src_data_rank = src_data_rank
        _replace(model, path, made._apply(model.get_submodule(path), over))
    for path, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            module.path = path
    for block in blocks:
        _take_own_heads(model, block.path, heads, over, src_data_rank)
        if block.shares:
            share_input(model, block)
    for path in found.lora:
        shard_lora(model.get_submodule(path), over, src_data_rank)
    for path, watched in found.tried.items():
        watch(model.get_submodule(path), watched)
    gather_outputs(model, styles, found.by_row if sequence_parallel else lambda _: False, name)
    inner = {block.path for block in blocks} | found.tried.keys() | {*all_rows}
    rows = shard_rows(model, outer, inner, name, sequence_dim, check) if sequence_parallel else []
    known = _replicate_parts(model, over, blocks, all_rows, rows, at, src_data_rank)
    make_replicated(model, over, False, known, src_data_rank)
    plain_in_parents(model)
    if check:
        same = [model.get_submodule(path) for path in all_rows] if sequence_parallel else [model]
        check_numbers(model, same, name)
    save_whole(model)
    watch_model(model, name)
    return model


@dataclass(frozen=True)
class _Planned:
    """What becomes of a model.

    styles : of linear layers and of other modules, by path.
    blocks : modules around linear layers.
    fused : layers that are split first.
    lora : paths of the LoRA around layers in ``styles``.
    routed : what paths begin with, of parts in which rows have any order.
    outer : the blocks of each list.
    all_rows : paths of modules that take the rows of all ranks, and why.
    tried : modules whose first call is tried, by path.
    """

    styles: Styles
    blocks: list[Block]
    fused: list[FusedLayer]
    lora: list[str]
    heads: Heads
    routed: tuple[str, ...]
    outer: list[list[tuple[str, nn.Module]]]
    all_rows: dict[str, str]
    tried: dict[str, Tried]

    def by_row(self, path: str) -> bool:
        """Whether the module at ``path`` has the rows of one rank in the sequence-parallel form."""
        return has_own_rows(path, [root for blocks in self.outer for root, _ in blocks] or [""])


def _planned(
    model: nn.Module, plan: str | Styles, size: int, check: bool, sequence_dim: int | None
) -> _Planned:
    """The plan of ``model`` over ``size`` ranks, checked. Nothing is changed. ``sequence_dim``:
    None in the all-reduce form."""
    styles, blocks, fused, whole = _styles(model, plan, size, check)
    check_whole(model, styles, {layer.path for layer in fused})
    styles, blocks, lora = take_base_layers(model, styles, blocks)
    heads = Heads.of(model, blocks, fused, styles, size)
    check_styles(model, styles, size, heads.shared)
    every = styles.keys() | {path for layer in fused for path in block_of(layer).paths()}
    styled = {**dict.fromkeys(every, COLUMN), **styles}
    blocks = _checked(model, blocks, fused, styled, whole, heads, size, check)
    routed: tuple[str, ...] = ()
    outer: list[list[tuple[str, nn.Module]]] = []
    all_rows: dict[str, str] = {}
    if sequence_dim is not None:
        routed, outer = routed_parts(model, styles), _outer_lists(model, [*styled])
        roots = [root for blocks_of_list in outer for root in blocks_of_list] or [("", model)]
        gathers = plan == "auto"
        unshared = [each for each in blocks if not each.shares]
        unshared += [block_of(layer) for layer in fused if not layer.shares]
        counting = [
            block.path
            for block in unshared
            if check and gathers and counts_rows(model, block, size, sequence_dim)
        ]
        all_rows = check_own_rows(roots, blocks, styled, routed, lora, gathers, counting)
    named = {*styles} if isinstance(plan, dict) else None
    tried = _tried(model, styles, fused, heads, size, named) if check else {}
    return _Planned(styles, blocks, fused, lora, heads, routed, outer, all_rows, tried)


def _checked(
    model: nn.Module,
    blocks: list[Block],
    fused: list[FusedLayer],
    styled: Styles,
    whole: set[str],
    heads: Heads,
    size: int,
    check: bool,
) -> list[Block]:
    """``blocks``, checked, as are ``fused``. With ``check`` a trial may confirm what attributes of
    them are."""
    found = []
    for block in blocks:
        if check:
            module = model.get_submodule(block.path)
            heads.guess(block.path, *attributes_to_share(module, block, size))
        counted = heads.counts.get(block.path, ())
        found.append(check_block(model, block, styled, whole, size, heads.shared, counted))
        if check and not found[-1].shares:
            heads.widen(block.path)
    for number, layer in enumerate(fused):
        fused[number] = check_fused(model, layer, styled, whole, size)
        if layer.guessed:
            module = model.get_submodule(layer.path)
            share = attributes_to_share(module, block_of(layer), size, layer.sizes)
            heads.guess(layer.path, *share)
            heads.guessed.add(layer.path)
            if not fused[number].shares:
                heads.widen(layer.path)
    return found


def _take_own_heads(
    model: nn.Module, path: str, heads: Heads, mesh: DeviceMesh, source: int | None
) -> None:
    """Let a module count the heads of one rank, and have the parameters of those."""
    module = model.get_submodule(path)
    take_own_heads(module, heads.counts.get(path, {}), mesh)
    by_head = [name for name in BY_HEAD if module._parameters.get(name) is not None]
    if by_head:
        shard_own(module, by_head, mesh, source)


def _replicate_parts(
    model: nn.Module,
    mesh: DeviceMesh,
    blocks: list[Block],
    all_rows: dict[str, str],
    own_rows: list[nn.Module],
    dim: int | None,
    source: int | None,
) -> dict[nn.Parameter, nn.Parameter]:
    """Replicate the parameters that see a part of the heads or rows, and those of modules that take
    all rows, which are gathered along ``dim``. Returns the new parameters by the old ones."""
    known: dict[nn.Parameter, nn.Parameter] = {}
    for block in blocks:
        for child, part in model.get_submodule(block.path).named_children():
            if child in OWN_HEADS:
                make_replicated(part, mesh, True, known, source)
    for path, why in all_rows.items():
        part = model.get_submodule(path)
        AllRows(path, why, part, name_of(mesh), dim or 0)
        make_replicated(part, mesh, False, known, source)
    for part in own_rows:  # all else that is not sharded
        make_replicated(part, mesh, True, known, source)
    return known


def _one_dimension(mesh: Group | None) -> Group | None:
    names = mesh.mesh_dim_names or () if isinstance(mesh, DeviceMesh) else ()
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 1 and "tp" in names:
        return mesh["tp"]
    return mesh


def _styles(
    model: nn.Module, plan: str | Styles, size: int, guess: bool
) -> tuple[Styles, list[Block], list[FusedLayer], set[str]]:
    """The style of each module by path, the modules whose layers share their input, the layers that
    are to be split before, and paths that transformers leaves whole."""
    if isinstance(plan, dict):
        styles = matched(model, plan)
        fused = split_fused(model, styles, size, None, guess)
        return styles, blocks_of(styles), fused, set()
    require(plan == "auto", f"plan={plan!r}", '"auto" or a dict', "pass one of them")
    given = of_transformers(model)
    if given is None or not {COLUMN, ROW} & {*given.values()}:  # some plans have the head only
        return _recognised(model, size, guess)
    styles: Styles = dict.fromkeys(experts_of(model, size), EXPERTS)
    given = _without_experts(model, given)
    known = (COLUMN, ROW, LATENT, *SUMS, *WHOLE)
    for pattern, style in given.items():
        require(
            style in known,
            f"the plan of {type(model).__name__}, which has {pattern!r}: {style!r}",
            ", ".join(known),
            "pass plan={...} without it, or load with tileweave.integrations.transformers",
        )
    styles.update(matched(model, {p: s for p, s in given.items() if s not in WHOLE}, strict=False))
    take_latent(model, styles)
    whole = matched(model, {p: s for p, s in given.items() if s in WHOLE}, strict=False)
    fused = split_fused(model, styles, size, given)
    if not styles and not fused:
        return _recognised(model, size, guess)
    return styles, blocks_of(styles), fused, {*whole}


def _without_experts(model: nn.Module, given: dict[str, str]) -> dict[str, str]:
    """``given`` without the entries of transformers for stacked experts, of which some are
    sharded by expert and others stay whole, and for parameters of attentions themselves."""
    kept = {}
    for pattern, style in given.items():
        named = [(path, m) for path, m in model.named_modules() if fnmatchcase(path, pattern)]
        if style in (*STACKED, HAS_BY_HEAD) and not any(isinstance(m, nn.Linear) for _, m in named):
            for path, module in named if style == STACKED[0] else ():
                if not is_described(module):
                    _LOG.warning(
                        "%s stays whole on every rank: use_experts_implementation of transformers "
                        "does not describe it",
                        path,
                    )
        else:
            kept[pattern] = style
    return kept


def _recognised(
    model: nn.Module, size: int, guess: bool
) -> tuple[Styles, list[Block], list[FusedLayer], set[str]]:
    blocks, fused = recognise(model, size, guess)
    blocks = [block for block in blocks if not block.guessed or _passes(model, block, size)]
    styles: Styles = {path: kind for b in blocks for path, kind in b.paths().items()}
    styles.update(dict.fromkeys(experts_of(model, size), EXPERTS))
    return styles, blocks, fused, set()


def _passes(model: nn.Module, block: Block, size: int) -> bool:
    """Whether a plan of ``block`` alone passes all checks."""
    styles: Styles = {**block.paths()}
    try:
        heads = Heads.of(model, [block], [], styles, size)
        check_styles(model, styles, size, heads.shared)
        _checked(model, [block], [], styles, set(), heads, size, True)
        _tried(model, styles, [], heads, size, None)
    except InputError as error:
        _LOG.info("%s stays whole on every rank: %s", block.path, error)
        return False
    return True


def _tried(
    model: nn.Module,
    styles: Styles,
    fused: list[FusedLayer],
    heads: Heads,
    size: int,
    named: set[str] | None,
) -> dict[str, Tried]:
    """The modules around sharded layers by path. Those that take one tensor are tried.

    ``named``: paths that the plan of a user names. ``fused``: those that a trial shows to have
    other parts are replaced.
    """
    columns = [path for path, style in styles.items() if is_column(style)]
    rows = [path for path, style in styles.items() if is_row(style)]
    parts = {path: _parts(model, path, style, heads) for path, style in styles.items()}
    for layer in fused:
        name, row = block_of(layer).paths()
        columns.append(name)
        rows.append(row)
        parts[name] = tuple((n, layer.copies.get(part, 1)) for part, n in layer.sizes.items())
    check_hooks(model, [*columns, *rows])
    found = modules_to_try(model, columns, rows, size)
    assert heads.guessed <= found.keys(), "their layers are direct parts of them"
    for path, tried in found.items():
        if named is not None:
            check_between(model, tried, named)
        tried.form, tried.guessed = Form(heads.counts.get(path, {})), path in heads.guessed
        tried.others = heads.others.get(path, ())
        module = model.get_submodule(path)
        known = known_attention(module)
        # what has numbers for the heads of one rank cannot be tried with those of all
        by_head = known is not None and bool(known.by_head)
        tried.done = by_head or (
            not tried.guessed and not tried.form.counts and counts_heads(module)
        )
        guessed = next((layer for layer in fused if layer.path == path and layer.guessed), None)
        try:
            try_made_up_input(model, tried, parts)
        except InputError:
            if guessed is None:
                raise
            # what belongs to one head may be adjacent
            adjacent = {**parts, next(iter(block_of(guessed).paths())): ()}
            with suppress(InputError):
                try_made_up_input(model, tried, adjacent)
            if not tried.done:
                raise
            fused[fused.index(guessed)] = replace(guessed, sizes={}, copies={})
        heads.counts[path] = tried.form.counts
    return found


def _parts(model: nn.Module, path: str, style: str | ParallelStyle, heads: Heads) -> Parts:
    """The projections of the layer at ``path``, () for one that ranks do not share."""
    if isinstance(style, Colwise) and style.parts:
        return tuple((n, style.copies_of(part)) for part, n in style.parts.items())
    copies = style.copies_of("") if isinstance(style, Colwise) else heads.shared.get(path, 1)
    layer: Any = model.get_submodule(path)
    return ((layer.out_features, copies),) if copies > 1 else ()


def _style(style: str | ParallelStyle, sequence_dim: int | None, copies: int) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style == COLUMN:
        return Colwise(sequence_dim=sequence_dim, copies=copies)
    if style == ROW:
        return Rowwise(sequence_dim=sequence_dim)
    if style == EXPERTS:
        return Experts(sequence_dim=sequence_dim)
    return SequenceParallel()


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    if module is not model.get_submodule(path):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)


def _outer_lists(model: nn.Module, paths: list[str]) -> list[list[tuple[str, nn.Module]]]:
    """The blocks (path, module) of each list that has modules of ``paths`` in its blocks: those
    from the first to the last one with such modules. Others, as an embedding, see all rows."""
    found: list[list[tuple[str, nn.Module]]] = []
    inside: list[str] = []
    for path, module in model.named_modules():  # lists before those in them
        dot = f"{path}." if path else ""
        if not isinstance(module, CONTAINERS) or dot.startswith((*inside, "\0")):
            continue
        blocks = [(dot + name, block) for name, block in module.named_children()]
        has = [any(p.startswith(f"{block}.") for p in paths) for block, _ in blocks]
        # a ModuleDict may be no list of blocks: embedding, blocks and norm, as in nanoGPT
        if not any(has) or (isinstance(module, nn.ModuleDict) and not all(has)):
            continue
        blocks = blocks[has.index(True) : len(has) - has[::-1].index(True)]
        if any(isinstance(block, (nn.ModuleList, nn.ModuleDict)) for _, block in blocks):
            blocks = [_around(model, path)]
        found.append(blocks)
        inside.append(f"{blocks[0][0]}." if len(blocks) == 1 else dot)
    return found


def _around(model: nn.Module, path: str) -> tuple[str, nn.Module]:
    """The module around the list at ``path``, whose forward calls what is in its lists."""
    parent, module = path, model.get_submodule(path)
    while parent and isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        parent = parent.rpartition(".")[0]
        module = model.get_submodule(parent)
    require(
        bool(parent),
        f"sequence_parallel=True with {path or type(model).__name__}, a list of lists of layers",
        "a list of blocks, or such a list in a module of its own without other layers",
        "put the layers of a block, and what is between them, into one module, or pass "
        "sequence_parallel=False",
    )
    return parent, module
