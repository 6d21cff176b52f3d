"""The operators of a transformer layer by mode, for training and serving.

Column-parallel matmuls gather their rows first. Row-parallel ones scatter their results (sequence
parallel, arXiv 2205.05198) or all-reduce them. M = rows of all ranks of the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import TypeVar

from tileweave.errors import require
from tileweave.planning.problem import FUSED_WORLD_SIZES
from tileweave.planning.schedules.gather import cdiv
from tileweave.sim.collectives import Group
from tileweave.sim.document import (
    Fields,
    Record,
    Spot,
    choice,
    either,
    fields_of,
    flag,
    integer,
    mapping_of,
    parse_document,
    text,
)
from tileweave.sim.operators import Mode, Operators, OpTime
from tileweave.sim.step import Part


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder. ``gated``: the MLP has gate and up projections. ``seq``: tokens per training
    sample."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    gated: bool = True
    seq: int = 4096
    source: str = "own"

    def __post_init__(self) -> None:
        require_heads(self.hidden, self.heads, self.kv_heads)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def qkv(self) -> int:
        """Columns of the joint query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def up(self) -> int:
        """Columns of the first projection of the MLP."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def layer_parameters(self) -> int:
        return self.hidden * (self.qkv + self.hidden + self.up + self.ffn)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.vocab * self.hidden


def require_heads(
    hidden: int, heads: int, kv_heads: int, remedy: str = "change one of both"
) -> None:
    """Refuse impossible sizes of attention."""
    require(
        hidden % heads == 0,
        f"hidden {hidden} with {heads} heads",
        "a multiple of the heads",
        remedy,
    )
    require(
        heads % kv_heads == 0,
        f"kv_heads {kv_heads}",
        f"a divisor of the {heads} heads",
        "change one of both",
    )


T = TypeVar("T")
_SIZE = integer(1, 10_000_000)
FIELDS = fields_of(
    Model,
    layers=_SIZE,
    hidden=_SIZE,
    ffn=_SIZE,
    heads=_SIZE,
    kv_heads=_SIZE,
    vocab=_SIZE,
    gated=flag,
    seq=_SIZE,
    source=text,
)


@cache
def catalogue(kind: str) -> dict[str, Spot]:
    """The published shapes in ``data/models.yaml`` of one kind (transformers, moe, dlrm), not yet
    parsed."""
    data = (resources.files("tileweave.sim") / "data" / "models.yaml").read_text("utf-8")
    whole = mapping_of(lambda spot: spot)(parse_document(data, "models.yaml"))
    return mapping_of(lambda spot: spot)(whole[kind])


def models_of(
    kind: str, fields: Fields, make: Callable[..., T]
) -> tuple[Callable[[Spot], T], Callable[[str], T]]:
    """Two functions of one kind of models: a reader of a published one's name or a mapping of
    sizes, and a published one by name. ``make`` gets the sizes and ``name``."""

    def known(name: str) -> T:
        return Record(fields, partial(make, name=name))(catalogue(kind)[name])

    def read(spot: Spot) -> T:
        named = choice(tuple(catalogue(kind)))
        own = Record(fields, partial(make, name="own model"))
        return either(lambda s: known(named(s)), own)(spot)

    return read, known


model_reader, known_model = models_of("transformers", FIELDS, Model)
ALONE = Group(1)


@dataclass(frozen=True, slots=True)
class Style:
    """How a layer is computed.

    fused_attention : one kernel. Otherwise, as in 2021: the scores are in memory, and softmax and
        dropout are passes over them; dropout and residual are passes of their own too.
    sequence_parallel : rows are sharded between matmuls (arXiv 2205.05198). Otherwise, as in 2021,
        each rank has all rows, and results are all-reduced.
    context : the ranks that share a sequence (context parallelism). They pass keys and values on
        around a ring, during attention.
    """

    fused_attention: bool = True
    sequence_parallel: bool = True
    context: Group = ALONE


# Bytes that unfused attention moves per score, in bf16 with a byte for dropout's mask. Forward: the
# product of Q and K written; softmax and dropout read and write; the last one's result read for the
# product with V. Backward: the gradient of that product written; dropout's and softmax's backward,
# which also read the mask and the probabilities; and each product that reads scores.
_SCORE_BYTES = {"forward": 13.0, "backward": 19.0}


class Layer:
    """The times of the operators of one layer as :class:`Part` objects, for one mode and one
    tensor-parallel degree.

    fuse : names of the operators that may be fused; None: all.
    replans : whether the layout of a layer may differ from that of unfused, for fused operators.
    """

    def __init__(
        self,
        model: Model,
        ops: Operators,
        tp: int,
        mode: Mode,
        fuse: Iterable[str] | None = None,
        style: Style | None = None,
    ) -> None:
        require(
            model.heads % tp == 0 and model.ffn % tp == 0,
            f"tp {tp} of {model.name}",
            f"a divisor of its {model.heads} heads and {model.ffn} columns",
            "change tp",
        )
        self.model, self.ops, self.tp, self.mode = model, ops, tp, mode
        self.style = style or Style()
        self.words = cdiv(model.vocab, tp) * tp  # the vocabulary, padded to a multiple of tp
        self.fuse = None if fuse is None else set(fuse)
        self.replans = mode == "bound" or (mode == "fused" and tp in (1, *FUSED_WORLD_SIZES))

    def part(
        self,
        name: str,
        phase: str,
        time: OpTime,
        op: str = "",
        collective: str = "",
        nbytes: float = 0.0,
    ) -> Part:
        """An operator as a part. What exceeds its computation is exposed communication."""
        seconds = time.of(self.mode, self.fuse is None or op in self.fuse)
        exposed = max(seconds - time.compute, 0.0) if collective else 0.0
        return Part(name, phase, seconds, exposed, collective, nbytes, self.tp, "tp", time.compute)

    def plain(self, name: str, phase: str, seconds: float) -> Part:
        return Part(name, phase, seconds, compute=seconds)

    def column(self, name: str, m: int, cols: int, depth: int, phase: str = "matmul") -> Part:
        """Gather rows, then multiply with this rank's columns."""
        if self.tp == 1:
            return self.part(name, phase, self.ops.matmul(m, cols, depth))
        time = self.ops.all_gather_matmul(self.tp, m, cols // self.tp, depth)
        return self.part(name, phase, time, "all_gather_matmul", "all_gather", m * depth * 2.0)

    def row(
        self,
        name: str,
        m: int,
        cols: int,
        depth: int,
        reduce: str = "reduce_scatter",
        phase: str = "matmul",
    ) -> Part:
        """Multiply this rank's part of K, then sum over ranks."""
        if self.tp == 1:
            return self.part(name, phase, self.ops.matmul(m, cols, depth))
        time = self.ops.matmul_scatter(reduce, self.tp, m, cols, depth // self.tp)
        return self.part(name, phase, time, f"matmul_{reduce}", reduce, m * cols * 2.0)

    def norm(self, rows: float) -> Part:
        """Normalize and add the residual: three reads or writes of the rows. With dropout, two
        kernels that read or write five and a half."""
        passes = 3.0 if self.style.fused_attention else 5.5
        return self.plain(
            "norm", "elementwise", self.ops.costs.stream(passes * rows * self.model.hidden * 2.0)
        )

    def activation(self, m: int) -> Part:
        return self.plain(
            "activation",
            "elementwise",
            self.ops.costs.stream(m * (self.model.up + self.model.ffn) / self.tp * 2.0),
        )

    def attention(self, m: int, seq: int, way: str = "forward") -> Part:
        """Causal attention of ``m`` rows over ``seq`` tokens: 2 * m * seq * hidden flop in forward,
        2.5 times that in backward. Unfused, nothing is left out of the square of scores."""
        flops = 2.0 * m * seq * self.model.hidden / self.tp
        if self.style.fused_attention:
            seconds = self.ops.costs.attention(flops * (1.0 if way == "forward" else 2.5))
        else:
            scores = float(m) * seq * self.model.heads / self.tp
            seconds = self.ops.costs.attention(flops * (2.0 if way == "forward" else 4.0))
            seconds += self.ops.costs.stream(_SCORE_BYTES[way] * scores)
        context = self.style.context
        if context.size == 1:
            return self.plain("attention", "attention", seconds)
        # keys and values of all ranks; in backward also their gradients
        columns = 2.0 * self.model.kv_heads * self.model.head_dim / self.tp
        nbytes = 2.0 * m * columns * context.size * (1.0 if way == "forward" else 2.0)
        whole = self.ops.at_best(seconds, self.ops.collective("all_gather", nbytes, context))
        return Part(
            "attention",
            "attention",
            whole,
            max(whole - seconds, 0.0),
            "all_gather",
            nbytes,
            context.size,
            "cp",
            seconds,
        )

    def forward(self, m: int, seq: int, sequence_parallel: bool | None = None) -> list[Part]:
        """The forward of one layer over ``m`` rows. ``sequence_parallel`` None: by the style."""
        if sequence_parallel is None:
            sequence_parallel = self.style.sequence_parallel
        model, rows = self.model, m / self.tp if sequence_parallel else float(m)
        reduce = "reduce_scatter" if sequence_parallel else "all_reduce"
        column = self.column if sequence_parallel else self.local_column
        return [
            self.norm(rows),
            column("qkv", m, model.qkv, model.hidden),
            self.attention(m, seq),
            self.row("proj", m, model.hidden, model.hidden, reduce),
            self.norm(rows),
            column("fc1", m, model.up, model.hidden),
            self.activation(m),
            self.row("fc2", m, model.hidden, model.ffn, reduce),
        ]

    def local_column(self, name: str, m: int, cols: int, depth: int, phase: str = "matmul") -> Part:
        """A matmul alone, because each rank has all rows already."""
        return self.part(name, phase, self.ops.matmul(m, max(cols // self.tp, 1), depth))

    def backward(self, m: int, seq: int) -> tuple[list[Part], list[Part]]:
        """The backward of one layer: what the layer before waits for, and the gradients of weights,
        which only the optimiser waits for."""
        model, rows = self.model, m / self.tp if self.style.sequence_parallel else float(m)
        fc2, fc2_weight = self._row_backward("fc2", m, model.hidden, model.ffn)
        fc1, fc1_weight = self.column_backward("fc1", m, model.up, model.hidden)
        proj, proj_weight = self._row_backward("proj", m, model.hidden, model.hidden)
        qkv, qkv_weight = self.column_backward("qkv", m, model.qkv, model.hidden)
        inputs = [
            fc2,
            self.activation(m),
            fc1,
            self.norm(rows),
            proj,
            self.attention(m, seq, "backward"),
            qkv,
            self.norm(rows),
        ]
        return inputs, [fc2_weight, fc1_weight, proj_weight, qkv_weight]

    def joint_backward(self, m: int, seq: int) -> list[Part]:
        """The same in one: gradients of weights hide communication. Unfused as in Megatron: the
        gather of x is hidden by dgrad, the reduce-scatter of its result by wgrad; the gather of dy
        before row-parallel layers is exposed."""
        model, rows = self.model, m / self.tp if self.style.sequence_parallel else float(m)
        return [
            *self._row_backward("fc2", m, model.hidden, model.ffn),
            self.activation(m),
            *self.joint_column_backward("fc1", m, model.up, model.hidden),
            self.norm(rows),
            *self._row_backward("proj", m, model.hidden, model.hidden),
            self.attention(m, seq, "backward"),
            *self.joint_column_backward("qkv", m, model.qkv, model.hidden),
            self.norm(rows),
        ]

    def _row_backward(self, name: str, m: int, cols: int, depth: int) -> tuple[Part, Part]:
        column = self.column if self.style.sequence_parallel else self.local_column
        dgrad = column(f"{name} dgrad", m, depth, cols)
        wgrad = self.part(f"{name} wgrad", "matmul", self.ops.matmul(cols, depth // self.tp, m))
        return dgrad, wgrad

    def column_backward(self, name: str, m: int, cols: int, depth: int) -> tuple[Part, Part]:
        """The two gradients of a column-parallel matmul by themselves."""
        local, ops = cols // self.tp, self.ops
        wgrad = ops.matmul(local, depth, m)
        reduce = "reduce_scatter" if self.style.sequence_parallel else "all_reduce"
        dgrad = self.row(f"{name} dgrad", m, depth, cols, reduce)
        if self.tp == 1 or not self.style.sequence_parallel:
            return dgrad, self.part(f"{name} wgrad", "matmul", wgrad)
        gather = ops.all_gather_matmul(self.tp, m, local, depth).comm
        seconds = ops.at_best(wgrad.unfused, gather)
        exposed = max(seconds - wgrad.unfused, 0.0)
        return dgrad, Part(
            f"{name} wgrad",
            "matmul",
            seconds,
            exposed,
            "all_gather",
            m * depth * 2.0,
            self.tp,
            "tp",
            wgrad.unfused,
        )

    def joint_column_backward(self, name: str, m: int, cols: int, depth: int) -> list[Part]:
        """Both gradients of a column-parallel matmul, with what they hide of each other."""
        local, ops = cols // self.tp, self.ops
        if self.tp == 1 or not self.style.sequence_parallel:
            return [*self.column_backward(name, m, cols, depth)]
        wgrad = ops.matmul(local, depth, m)
        fused = ops.matmul_scatter("reduce_scatter", self.tp, m, depth, local)
        gather = ops.all_gather_matmul(self.tp, m, local, depth).comm
        pair = ops.at_best(fused.compute, gather) + ops.at_best(wgrad.unfused, fused.comm)
        allowed = self.fuse is None or "matmul_reduce_scatter" in self.fuse
        if self.replans and allowed:
            pair = min(pair, fused.of(self.mode) + ops.at_best(wgrad.unfused, gather))
        compute = fused.compute + wgrad.unfused
        exposed = max(pair - compute, 0.0)
        return [
            Part(
                f"{name} backward",
                "matmul",
                pair,
                exposed,
                "reduce_scatter",
                m * depth * 2.0,
                self.tp,
                "tp",
                compute,
            )
        ]
