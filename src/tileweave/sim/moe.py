"""The forward of mixture-of-experts layers: attention data parallel, experts sharded over ``ep``
ranks.

dispatch - first grouped matmul - activation - second grouped matmul - combine - sum over top-k.

The set-up says what else an engine does: rows to each rank by NCCL or DeepEP's kernels
(``token_exchange.py``), FP8, two batches that overlap each other's communication, latent attention,
shared experts and dense layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tileweave.errors import require
from tileweave.planning.costs import Costs
from tileweave.sim import token_exchange
from tileweave.sim.collectives import group_of
from tileweave.sim.document import (
    Record,
    checked,
    choice,
    fields_of,
    flag,
    integer,
    number,
    text,
)
from tileweave.sim.machine import Cluster
from tileweave.sim.operators import ExpertMatmul, Mode, Operators, OpTime
from tileweave.sim.serving import HOST, LAYER_PREFILL
from tileweave.sim.step import Part, Step, Timeline
from tileweave.sim.token_exchange import Tokens, exchange_time
from tileweave.sim.transformer import models_of, require_heads

# FP8 matmuls against bf16 ones: the best that MAMF finds on H100, 1402.6 and 794.5 TFLOP/s
# (stas00/ml-engineering, compute/accelerator).
FP8_RATE = 1.77
# Multiprocessors that DeepEP's normal kernels occupy while a matmul runs (DeepEP's README, V1).
EXCHANGE_SMS = 24


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): columns of the compressed queries, of the
    compressed keys and values, and of a head: rotary, other, values."""

    queries: int
    keys: int
    rotary: int
    plain: int
    values: int


@dataclass(frozen=True, slots=True)
class Experts:
    """The layers of a model.

    ffn : columns of one expert, which is gated.
    head_dim : columns of a head; 0: hidden / heads.
    shared : shared experts, of ``ffn`` columns each.
    dense_layers, dense_ffn : the first layers, which have no experts, and their columns.
    vocab : for the logits of decoding; 0: not counted.
    node_limit : nodes that the experts of a token may be on; 0: all.
    latent : latent attention; None: multi-head attention.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    source: str = "own"
    head_dim: int = 0
    shared: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    vocab: int = 0
    node_limit: int = 0
    latent: Latent | None = None

    def __post_init__(self) -> None:
        columns = self.heads * self.head_dim or self.hidden
        require_heads(columns, self.heads, self.kv_heads, "change one of both, or say head_dim")
        require(
            self.top_k <= self.experts,
            f"top_k {self.top_k}",
            f"at most the {self.experts} experts",
            "lower top_k",
        )
        require(
            self.dense_layers < self.layers and (self.dense_layers > 0) == (self.dense_ffn > 0),
            f"dense_layers {self.dense_layers} of {self.dense_ffn} columns",
            f"less than the {self.layers} layers, with dense_ffn",
            "give both, or none",
        )

    @property
    def attended(self) -> int:
        """Columns of the queries of all heads, and of the output of attention."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def qkv(self) -> int:
        """Columns of the joint query, key and value projection."""
        return self.attended + 2 * self.kv_heads * (self.attended // self.heads)

    @property
    def attention_parameters(self) -> int:
        """Weights of attention in a layer."""
        if self.latent is None:
            return self.hidden * (self.qkv + self.attended)
        return sum(cols * depth for _, cols, depth in _latent_matmuls(self, self.latent))

    @property
    def cached(self) -> int:
        """Columns that a token has in the cache of a layer."""
        if self.latent is not None:
            return self.latent.keys + self.latent.rotary
        return 2 * self.kv_heads * (self.attended // self.heads)


_SIZE = integer(1, 10_000_000)
_LATENT = Record(
    fields_of(Latent, queries=_SIZE, keys=_SIZE, rotary=_SIZE, plain=_SIZE, values=_SIZE), Latent
)
_SHAPE = fields_of(
    Experts,
    layers=_SIZE,
    hidden=_SIZE,
    ffn=_SIZE,
    experts=_SIZE,
    top_k=integer(1, 64),
    heads=_SIZE,
    kv_heads=_SIZE,
    source=text,
    head_dim=integer(0, 65536, "columns (0: hidden / heads)"),
    shared=integer(0, 1024),
    dense_layers=integer(0, 10_000),
    dense_ffn=integer(0, 10_000_000),
    vocab=integer(0, 10_000_000),
    node_limit=integer(0, 65536, "nodes (0: all)"),
    latent=_LATENT,
)


experts_reader, known_experts = models_of("moe", _SHAPE, Experts)


@dataclass(frozen=True, slots=True)
class MoE:
    """A forward pass.

    ep : ranks over which experts are sharded; 0: all.
    tokens : per rank.
    seq : tokens per sample, for attention; in decode: those in the cache.
    imbalance : by how much the load of the busiest rank is above the average.
    phase : forward (the layers alone), prefill or decode (with the host, and logits in decode).
    exchange : what the unfused baseline sends tokens by: nccl, normal or low_latency
        (``token_exchange.py``).
    fp8 : matmuls and dispatched tokens in FP8; attention and what comes back in bf16.
    two_batch : the tokens of a rank in two halves; while one communicates, the other computes.
    redundant : copies of experts, so that ``ep`` divides them.
    """

    model: Experts
    ep: int = 0
    tokens: int = 4096
    seq: int = 4096
    imbalance: float = 0.0
    phase: str = "forward"
    exchange: token_exchange.Kind = "nccl"
    fp8: bool = False
    two_batch: bool = False
    redundant: int = 0

    def __post_init__(self) -> None:
        require(
            not self.two_batch or self.tokens > 1,
            f"two_batch with {self.tokens} token",
            "two tokens at least",
            "leave two_batch out",
        )

    @property
    def experts(self) -> int:
        """Experts with their copies."""
        return self.model.experts + self.redundant


FIELDS = fields_of(
    MoE,
    model=experts_reader,
    ep=integer(0, 65536),
    tokens=integer(1, 1 << 24),
    seq=integer(1, 1 << 24),
    imbalance=number(0.0, 10.0),
    phase=choice(("forward", "prefill", "decode")),
    exchange=choice(token_exchange.KINDS),
    fp8=flag,
    two_batch=flag,
    redundant=integer(0, 65536, "copies of experts"),
)


def by_name(model: str, **fields: Any) -> MoE:
    """The layers of a published model."""
    return MoE(known_experts(model), **checked(fields, FIELDS))


def simulate(moe: MoE, cluster: Cluster, ops: Operators, mode: Mode, fuse: Any = None) -> Timeline:
    """The forward of all layers; every rank has its own tokens. Fused operators run on whole
    batches; where two overlapping halves are faster, these are taken, as in unfused."""
    made = _Builder(moe, cluster, ops, mode, fuse).build()
    if not moe.two_batch or mode == "unfused":
        return made
    whole = _Builder(replace(moe, two_batch=False), cluster, ops, mode, fuse).build()
    return min(made, whole, key=lambda timeline: timeline.seconds)


class _Builder:
    def __init__(self, moe: MoE, cluster: Cluster, ops: Operators, mode: Mode, fuse: Any) -> None:
        self.moe, self.model, self.cluster, self.ops = moe, moe.model, cluster, ops
        ep = moe.ep or cluster.world_size
        require(
            ep <= cluster.world_size and cluster.world_size % ep == 0,
            f"ep {ep}",
            f"a divisor of {cluster.world_size}",
            "change ep",
        )
        require(
            moe.experts % ep == 0 or ep % moe.experts == 0,
            f"ep {ep}",
            f"what divides {moe.experts} experts",
            "change ep, or give redundant copies",
        )
        self.ep, self.group, self.skew = ep, group_of(cluster, ep), 1.0 + moe.imbalance
        # halves overlap by streams, not by fused operators
        self.mode: Mode = "unfused" if moe.two_batch else mode
        self.fuse = fuse
        self.tokens = moe.tokens // (2 if moe.two_batch else 1)
        self.rows = int(self.tokens * self.model.top_k * self.skew)
        self.attention_costs = ops.costs
        self.costs = _fp8_costs(ops, moe, cluster)
        half = ", two halves" if moe.two_batch else ""
        self.step = Step(f"{moe.model.name}, ep {ep}, {moe.tokens} tokens a rank{half}: {mode}")

    def build(self) -> Timeline:
        world = self.cluster.world_size
        self.step.representative(0, world, f"ranks 0 to {world - 1}", {})
        first = self._attention() + self._router()
        for layer in range(self.model.dense_layers):
            parts = (self._attention() + self._dense()) * (2 if self.moe.two_batch else 1)
            self.step.add(0, "compute", f"layer {layer}", parts)
        layers = range(self.model.dense_layers, self.model.layers)
        if self.moe.two_batch:
            self._halves(layers, first)
        else:
            parts = [*first, *self._shared(), *self._experts()]
            for layer in layers:
                self.step.add(0, "compute", f"layer {layer}", parts)
        if self.moe.phase != "forward":
            self.step.add(0, "compute", "ending", self._ending())
        return self.step.run()

    def _halves(self, layers: range, first: list[Part]) -> None:
        """Both halves layer by layer: while one is on its way to experts or back, the other
        computes."""
        dispatch, combine = self._way("dispatch"), self._way("combine")
        middle = self._middle()
        back: dict[int, list[int]] = {0: [], 1: []}
        for layer in layers:
            sent = {}
            for half in back:
                name = f"layer {layer}, half {half}"
                begun = self.step.add(0, "compute", name, first, back[half])
                sent[half] = self.step.add(
                    0, "comm", f"{name}, dispatch", [dispatch], [begun], "comm"
                )
                if self.model.shared:
                    self.step.add(0, "compute", f"{name}, shared", self._shared())
            for half in back:
                name = f"layer {layer}, half {half}"
                done = self.step.add(0, "compute", f"{name}, experts", middle, [sent[half]])
                back[half] = [
                    self.step.add(0, "comm", f"{name}, combine", [combine], [done], "comm")
                ]
        self.step.add(0, "compute", "join", [], [*back[0], *back[1]])

    # --- parts of a layer ---

    def _plain(self, name: str, phase: str, seconds: float) -> Part:
        return Part(name, phase, seconds, compute=seconds)

    def _norm(self) -> Part:
        nbytes = 3.0 * self.tokens * self.model.hidden * 2.0
        return self._plain("norm", "elementwise", self.attention_costs.stream(nbytes))

    def _matmul(self, name: str, cols: int, depth: int) -> Part:
        """A matmul of the rank's own tokens; in FP8 they are made such first."""
        seconds = self._quantized(self.tokens * depth) + self.costs.matmul(self.tokens, cols, depth)
        return self._plain(name, "matmul", seconds)

    def _quantized(self, elements: float) -> float:
        """Seconds of reading bf16 and writing FP8."""
        return self.attention_costs.stream(3.0 * elements) if self.moe.fp8 else 0.0

    def _attention(self) -> list[Part]:
        model, decode = self.model, self.moe.phase == "decode"
        if model.latent is not None:
            matmuls = [
                self._matmul(name, cols, depth)
                for name, cols, depth in _latent_matmuls(model, model.latent)
            ]
        else:
            matmuls = [
                self._matmul("qkv", model.qkv, model.hidden),
                self._matmul("proj", model.hidden, model.attended),
            ]
        seconds = self._scores_decoding() if decode else self._scores()
        other = LAYER_PREFILL if self.moe.phase == "prefill" else 0.0
        return [
            self._norm(),
            *matmuls[:-1],
            self._plain("attention", "attention", seconds),
            matmuls[-1],
            self._norm(),
            self._plain("other kernels", "elementwise", other),
        ]

    def _scores(self) -> float:
        """Causal attention of whole prompts."""
        model = self.model
        columns: float = model.attended
        if model.latent is not None:
            latent = model.latent
            columns = model.heads * (latent.rotary + latent.plain + latent.values) / 2.0
        return self.attention_costs.attention(2.0 * self.tokens * self.moe.seq * columns)

    def _scores_decoding(self) -> float:
        """Attention of one token of each sequence over its cache, which is read once. With latent
        attention all heads share what is cached, and multiply with it."""
        model, costs = self.model, self.attention_costs
        pairs = float(self.tokens * self.moe.seq)
        read = costs.stream(pairs * model.cached * 2.0)
        if model.latent is None:
            return read
        columns = 2.0 * model.latent.keys + model.latent.rotary
        return max(read, costs.attention(2.0 * pairs * model.heads * columns))

    def _router(self) -> list[Part]:
        found = self._matmul("router", max(self.model.experts, 8), self.model.hidden)
        return [self._plain("router", "matmul", found.seconds + self.ops.c.gap)]

    def _gated(self, name: str, ffn: int) -> list[Part]:
        """A gated MLP on the rank's own tokens."""
        hidden = self.model.hidden
        return [
            self._matmul(f"{name}, up", 2 * ffn, hidden),
            self._plain(
                f"{name}, activation",
                "elementwise",
                self.attention_costs.stream(6.0 * self.tokens * ffn),
            ),
            self._matmul(f"{name}, down", hidden, ffn),
        ]

    def _dense(self) -> list[Part]:
        return self._gated("dense", self.model.dense_ffn)

    def _shared(self) -> list[Part]:
        return (
            self._gated("shared", self.model.shared * self.model.ffn) if self.model.shared else []
        )

    def _experts(self) -> list[Part]:
        collective = "all_to_all" if self.ep > 1 else ""
        nbytes = self.rows * self.model.hidden * 2.0

        def part(name: str, time: OpTime, op: str) -> Part:
            seconds = time.of(self.mode, self.fuse is None or op in self.fuse)
            exposed = max(seconds - time.compute, 0.0)
            return Part(
                name, "experts", seconds, exposed, collective, nbytes, self.ep, "ep", time.compute
            )

        dispatch, combine = self._operators()
        return [
            part("dispatch and first matmul", dispatch, "dispatch_grouped_matmul"),
            self._activation(),
            part("second matmul and combine", combine, "grouped_matmul_combine"),
        ]

    def _operators(self) -> tuple[OpTime, OpTime]:
        model, ops = self.model, self.ops
        routed = self.tokens, model.top_k, self.moe.experts
        up = ExpertMatmul(*routed, 2 * model.ffn, model.hidden, self.skew)
        down = ExpertMatmul(*routed, model.hidden, model.ffn, self.skew)
        dispatch = partial(ops.dispatch_grouped, self.group, up)
        combine = partial(ops.grouped_combine, self.group, down)
        if self.moe.exchange == "nccl" and not self.moe.fp8:
            return dispatch(), combine()
        first, second = self._first_matmul().seconds, self._second_matmul().seconds
        if self.moe.exchange == "normal":
            second += self._sorted().seconds
        return (
            self._exchanged("dispatch", first, 0.0, dispatch),
            self._exchanged("combine", second, self._sum(), combine),
        )

    def _exchanged(
        self,
        way: token_exchange.Way,
        compute: float,
        total: float,
        tileweave: Callable[[], OpTime],
    ) -> OpTime:
        """A matmul of experts and an engine's exchange. Fused: tileweave's operator, in bf16."""
        ops = self.ops
        comm = self._sent(way, 1.0)
        unfused = ops.in_turn(compute, comm) + total
        if self.ep == 1:
            return OpTime(compute + total, compute + total, compute + total, compute, 0.0)
        fused = unfused if self.moe.fp8 else tileweave().fused
        taken = min(fused, unfused)
        return OpTime(unfused, taken, min(ops.at_best(compute, comm), taken), compute, comm + total)

    def _sent(self, way: token_exchange.Way, share: float) -> float:
        """Seconds of sending a share of the tokens to experts, or back."""
        model, moe = self.model, self.moe
        if self.ep == 1:
            return 0.0
        if moe.exchange == "nccl":
            tokens = Tokens(1.0, model.hidden, moe.experts, model.top_k)
            nbytes = self.rows * share * tokens.row(way, moe.fp8)
            return self.ops.collective("all_to_all", nbytes, self.group)
        tokens = Tokens(
            self.tokens * share * self.skew,
            model.hidden,
            moe.experts,
            model.top_k,
            model.node_limit if moe.exchange == "normal" else 0,
        )
        return exchange_time(moe.exchange, way, tokens, self.group, self.cluster, moe.fp8)

    def _way(self, way: token_exchange.Way) -> Part:
        nbytes = self.rows * self.model.hidden * 2.0
        seconds = self._sent(way, 1.0)
        return Part(way, "experts", seconds, seconds, "all_to_all", nbytes, self.ep, "ep", 0.0)

    def _sum(self) -> float:
        """The sum over the experts of a token; DeepEP's combine does it on the way."""
        if self.moe.exchange != "nccl":
            return 0.0
        return self.ops.reduce_top_k(self.tokens, self.model.top_k, self.model.hidden)

    def _middle(self) -> list[Part]:
        """What experts compute."""
        found = [self._first_matmul(), self._activation(), self._second_matmul()]
        return [*found, self._sorted()] if self.moe.exchange == "normal" else found

    def _grouped(self, name: str, cols: int, depth: int) -> Part:
        local = max(self.moe.experts // self.ep, 1)
        rows = -(-self.rows // local)
        return self._plain(name, "experts", self.costs.grouped_matmul(local, rows, cols, depth))

    def _first_matmul(self) -> Part:
        return self._grouped("first matmul", 2 * self.model.ffn, self.model.hidden)

    def _second_matmul(self) -> Part:
        return self._grouped("second matmul", self.model.hidden, self.model.ffn)

    def _activation(self) -> Part:
        nbytes = 3.0 * self.rows * self.model.ffn * 2.0
        return self._plain("activation", "elementwise", self.attention_costs.stream(nbytes))

    def _sorted(self) -> Part:
        """Rows that came to experts are put in their order, and are summed by token before they
        leave: what DeepEP's normal kernels leave to others."""
        dispatched = Tokens(1.0, self.model.hidden, 1, 1).row("dispatch", self.moe.fp8)
        nbytes = self.rows * (2.0 * dispatched + 3.0 * self.model.hidden)
        seconds = self.attention_costs.stream(nbytes)
        return self._plain("order of experts", "experts", seconds)

    def _ending(self) -> list[Part]:
        """The host, and in decode the logits."""
        host = self._plain("host", "host", HOST)
        if not self.model.vocab or self.moe.phase != "decode":
            return [host]
        costs = self.attention_costs
        head = costs.matmul(self.moe.tokens, self.model.vocab, self.model.hidden)
        return [self._plain("head", "head", head), host]


def _fp8_costs(ops: Operators, moe: MoE, cluster: Cluster) -> Costs:
    """Costs of matmuls: in FP8 at more flops and half the bytes; concurrent with DeepEP's normal
    kernels on fewer multiprocessors."""
    device = cluster.device
    if moe.two_batch and moe.exchange == "normal":
        left = device.num_sms - EXCHANGE_SMS
        device = replace(device, num_sms=left, flops=device.flops * left / device.num_sms)
    if moe.fp8:
        device = replace(
            device, flops=device.flops * FP8_RATE, memory_rate=device.memory_rate * 2.0
        )
    return ops.costs if device is cluster.device else Costs(device, ops.c, ops.costs.sustained)


def _latent_matmuls(model: Experts, latent: Latent) -> list[tuple[str, int, int]]:
    """(name, columns, depth) of the projections; the last one is after attention. In decode the
    projections of keys and values are multiplied with queries and outputs: the same weights."""
    head = latent.rotary + latent.plain
    return [
        ("compress queries", latent.queries, model.hidden),
        ("queries", model.heads * head, latent.queries),
        ("compress keys and values", latent.keys + latent.rotary, model.hidden),
        ("keys and values", model.heads * (latent.plain + latent.values), latent.keys),
        ("proj", model.hidden, model.heads * latent.values),
    ]
