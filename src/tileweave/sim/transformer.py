"""The operators of a transformer layer by mode, for training and serving.

Column-parallel matmuls gather their rows first. Row-parallel ones scatter their results (sequence
parallel, arXiv 2205.05198) or all-reduce them. M = rows of all ranks of the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tileweave.errors import require
from tileweave.planning.problem import FUSED_WORLD_SIZES
from tileweave.planning.schedules.gather import cdiv
from tileweave.sim.document import (
    REQUIRED,
    Reader,
    Record,
    Spot,
    choice,
    either,
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
    gated: bool
    seq: int
    source: str

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


_SIZE = integer(1, 10_000_000)
FIELDS: dict[str, tuple[Reader, Any]] = {
    "layers": (_SIZE, REQUIRED),
    "hidden": (_SIZE, REQUIRED),
    "ffn": (_SIZE, REQUIRED),
    "heads": (_SIZE, REQUIRED),
    "kv_heads": (_SIZE, REQUIRED),
    "vocab": (_SIZE, REQUIRED),
    "gated": (flag, True),
    "seq": (_SIZE, 4096),
    "source": (text, "own"),
}


@cache
def catalogue(kind: str) -> dict[str, Spot]:
    """The published shapes in ``data/models.yaml`` of one kind (transformers, moe, dlrm), not yet
    parsed."""
    data = (resources.files("tileweave.sim") / "data" / "models.yaml").read_text("utf-8")
    whole = mapping_of(lambda spot: spot)(parse_document(data, "models.yaml"))
    return mapping_of(lambda spot: spot)(whole[kind])


def model_reader(spot: Spot) -> Model:
    """The name of a published model, or a mapping with its sizes."""
    known = catalogue("transformers")
    return either(
        lambda s: known_model(choice(tuple(known))(s)),
        Record(FIELDS, lambda **fields: Model(name="own model", **fields)),
    )(spot)


def known_model(name: str) -> Model:
    """A published model by name."""
    return Record(FIELDS, lambda **fields: Model(name=name, **fields))(
        catalogue("transformers")[name]
    )


class Layer:
    """The times of the operators of one layer as :class:`Part` objects, for one mode and one
    tensor-parallel degree.

    fuse : names of the operators that may be fused; None: all.
    replans : whether the layout of a layer may differ from that of unfused, for fused operators.
    """

    def __init__(
        self, model: Model, ops: Operators, tp: int, mode: Mode, fuse: Iterable[str] | None = None
    ) -> None:
        require(
            model.heads % tp == 0 and model.ffn % tp == 0,
            f"tp {tp} of {model.name}",
            f"a divisor of its {model.heads} heads and {model.ffn} columns",
            "change tp",
        )
        self.model, self.ops, self.tp, self.mode = model, ops, tp, mode
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
        """Normalize and add the residual: three reads or writes of the rows."""
        return self.plain(
            "norm", "elementwise", self.ops.costs.stream(3 * rows * self.model.hidden * 2.0)
        )

    def activation(self, m: int) -> Part:
        return self.plain(
            "activation",
            "elementwise",
            self.ops.costs.stream(m * (self.model.up + self.model.ffn) / self.tp * 2.0),
        )

    def attention(self, m: int, seq: int, factor: float = 1.0) -> Part:
        """Causal attention over ``seq`` tokens, ``m`` rows in all: 2 * m * seq * hidden flop in
        forward."""
        seconds = self.ops.costs.attention(factor * 2.0 * m * seq * self.model.hidden / self.tp)
        return self.plain("attention", "attention", seconds)

    def forward(self, m: int, seq: int, sequence_parallel: bool = True) -> list[Part]:
        """The forward of one layer over ``m`` rows."""
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

    def backward(self, m: int, seq: int) -> list[Part]:
        """The backward of one layer, sequence parallel. Unfused as in Megatron: the gather of x is
        hidden by dgrad, the reduce-scatter of its result by wgrad; the gather of dy before
        row-parallel layers is exposed."""
        model = self.model
        return [
            *self._row_backward("fc2", m, model.hidden, model.ffn),
            self.activation(m),
            *self._column_backward("fc1", m, model.up, model.hidden),
            self.norm(m / self.tp),
            *self._row_backward("proj", m, model.hidden, model.hidden),
            self.attention(m, seq, 2.5),
            *self._column_backward("qkv", m, model.qkv, model.hidden),
            self.norm(m / self.tp),
        ]

    def _row_backward(self, name: str, m: int, cols: int, depth: int) -> list[Part]:
        dgrad = self.column(f"{name} dgrad", m, depth, cols)
        wgrad = self.part(f"{name} wgrad", "matmul", self.ops.matmul(cols, depth // self.tp, m))
        return [dgrad, wgrad]

    def _column_backward(self, name: str, m: int, cols: int, depth: int) -> list[Part]:
        local, ops = cols // self.tp, self.ops
        wgrad = ops.matmul(local, depth, m)
        if self.tp == 1:
            return [
                self.part(f"{name} dgrad", "matmul", ops.matmul(m, depth, local)),
                self.part(f"{name} wgrad", "matmul", wgrad),
            ]
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
