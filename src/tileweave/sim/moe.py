"""The forward of mixture-of-experts layers: attention data parallel, experts sharded over ``ep``
ranks.

dispatch (all-to-all) - first grouped matmul - activation - second grouped matmul - combine
(all-to-all) - sum over top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tileweave.errors import require
from tileweave.sim.collectives import group_of
from tileweave.sim.document import (
    REQUIRED,
    Reader,
    Record,
    Spot,
    checked,
    choice,
    either,
    integer,
    number,
    text,
)
from tileweave.sim.machine import Cluster
from tileweave.sim.operators import Mode, Operators
from tileweave.sim.step import Part, Step, Timeline
from tileweave.sim.transformer import catalogue, require_heads


@dataclass(frozen=True, slots=True)
class Experts:
    """The expert layers of a model. Shared experts, and layers without experts, are left out.

    ffn : columns of one expert, which is gated.
    head_dim : columns of a head; 0: hidden / heads.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    source: str
    head_dim: int = 0

    def __post_init__(self) -> None:
        columns = self.heads * self.head_dim or self.hidden
        require_heads(columns, self.heads, self.kv_heads, "change one of both, or say head_dim")
        require(
            self.top_k <= self.experts,
            f"top_k {self.top_k}",
            f"at most the {self.experts} experts",
            "lower top_k",
        )

    @property
    def attended(self) -> int:
        """Columns of the queries of all heads, and of the output of attention."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def qkv(self) -> int:
        """Columns of the joint query, key and value projection."""
        return self.attended + 2 * self.kv_heads * (self.attended // self.heads)


_SIZE = integer(1, 10_000_000)
_SHAPE: dict[str, tuple[Reader, Any]] = {
    "layers": (_SIZE, REQUIRED),
    "hidden": (_SIZE, REQUIRED),
    "ffn": (_SIZE, REQUIRED),
    "experts": (_SIZE, REQUIRED),
    "top_k": (integer(1, 64), REQUIRED),
    "heads": (_SIZE, REQUIRED),
    "kv_heads": (_SIZE, REQUIRED),
    "source": (text, "own"),
    "head_dim": (integer(0, 65536, "columns (0: hidden / heads)"), 0),
}


def experts_reader(spot: Spot) -> Experts:
    """The name of a published model, or a mapping."""
    known = catalogue("moe")
    return either(
        lambda s: known_experts(choice(tuple(known))(s)),
        Record(_SHAPE, lambda **f: Experts(name="own model", **f)),
    )(spot)


def known_experts(name: str) -> Experts:
    """A published model by name."""
    return Record(_SHAPE, lambda **fields: Experts(name=name, **fields))(catalogue("moe")[name])


@dataclass(frozen=True, slots=True)
class MoE:
    """A forward pass.

    ep : ranks over which experts are sharded; 0: all.
    tokens : per rank.
    seq : tokens per sample, for attention.
    imbalance : by how much the load of the busiest rank is above the average.
    """

    model: Experts
    ep: int = 0
    tokens: int = 4096
    seq: int = 4096
    imbalance: float = 0.0


FIELDS: dict[str, tuple[Reader, Any]] = {
    "model": (experts_reader, REQUIRED),
    "ep": (integer(0, 65536), 0),
    "tokens": (integer(1, 1 << 24), 4096),
    "seq": (integer(1, 1 << 24), 4096),
    "imbalance": (number(0.0, 10.0), 0.0),
}


def by_name(model: str, **fields: Any) -> MoE:
    """The layers of a published model."""
    return MoE(known_experts(model), **checked(fields, FIELDS))


def simulate(moe: MoE, cluster: Cluster, ops: Operators, mode: Mode, fuse: Any = None) -> Timeline:
    """The forward of all layers; every rank has its own tokens."""
    model, ep = moe.model, moe.ep or cluster.world_size
    require(
        ep <= cluster.world_size and cluster.world_size % ep == 0,
        f"ep {ep}",
        f"a divisor of {cluster.world_size}",
        "change ep",
    )
    require(
        model.experts % ep == 0 or ep % model.experts == 0,
        f"ep {ep}",
        f"what divides {model.experts} experts",
        "change ep",
    )
    group, skew = group_of(cluster, ep), 1.0 + moe.imbalance
    rows = int(moe.tokens * model.top_k * skew)
    costs, c = ops.costs, ops.c
    nbytes = rows * model.hidden * 2.0
    dispatch = ops.dispatch_grouped(
        group, moe.tokens, model.top_k, model.experts, 2 * model.ffn, model.hidden, skew
    )
    combine = ops.grouped_combine(
        group, moe.tokens, model.top_k, model.experts, model.hidden, model.ffn, skew
    )

    def part(name: str, phase: str, time: Any, op: str, collective: str) -> Part:
        seconds = time.of(mode, fuse is None or op in fuse)
        return Part(
            name,
            phase,
            seconds,
            max(seconds - time.compute, 0.0),
            collective,
            nbytes,
            ep,
            "ep",
            time.compute,
        )

    def plain(name: str, phase: str, seconds: float) -> Part:
        return Part(name, phase, seconds, compute=seconds)

    parts = [
        plain("norm", "elementwise", costs.stream(3 * moe.tokens * model.hidden * 2.0)),
        plain("qkv", "matmul", costs.matmul(moe.tokens, model.qkv, model.hidden)),
        plain(
            "attention", "attention", costs.attention(2.0 * moe.tokens * moe.seq * model.attended)
        ),
        plain("proj", "matmul", costs.matmul(moe.tokens, model.hidden, model.attended)),
        plain("norm", "elementwise", costs.stream(3 * moe.tokens * model.hidden * 2.0)),
        plain(
            "router",
            "matmul",
            costs.matmul(moe.tokens, max(model.experts, 8), model.hidden) + c.gap,
        ),
        part(
            "dispatch and first matmul",
            "experts",
            dispatch,
            "dispatch_grouped_matmul",
            "all_to_all" if ep > 1 else "",
        ),
        plain("activation", "elementwise", costs.stream(3.0 * rows * model.ffn * 2.0)),
        part(
            "second matmul and combine",
            "experts",
            combine,
            "grouped_matmul_combine",
            "all_to_all" if ep > 1 else "",
        ),
    ]
    step = Step(f"{model.name}, ep {ep}, {moe.tokens} tokens a rank: {mode}")
    step.representative(0, cluster.world_size, f"ranks 0 to {cluster.world_size - 1}", {})
    for layer in range(model.layers):
        step.add(0, "compute", f"layer {layer}", parts)
    return step.run()
