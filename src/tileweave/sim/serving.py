"""Serving a transformer by an engine: a prefill, a decoding step, or whole requests; tensor
parallel inside a node, pipeline parallel over nodes.

The baseline is an engine: its all-reduces of few rows are one launch of its own kernel where that
is faster than NCCL (vLLM, TensorRT-LLM and SGLang have one). Each step has host time, a gather of
logits and sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tileweave.errors import require
from tileweave.sim.collectives import Group, bulk
from tileweave.sim.document import checked, choice, fields_of, flag, integer
from tileweave.sim.machine import Cluster
from tileweave.sim.network import inside_hops, message, view
from tileweave.sim.operators import Mode, Operators
from tileweave.sim.step import Part, Step, Timeline, between
from tileweave.sim.transformer import Layer, Model, known_model, model_reader

# Fitted to the published figures that are not held out (``data/public.yaml``, group serving):
# seconds of the host for a step; of each layer of a prefill, for what is not listed here (rotary
# embedding, writes to the cache, launches); of each layer of a decoding step, for each doubling of
# tp (ranks that wait for each other); and the part of keys and values that is read again for each
# query without grouped queries.
HOST = 2.0e-3
LAYER_PREFILL, LAYER_DECODE = 250e-6, 40e-6
READ_AGAIN = 0.56
SAMPLING_PASSES = 4.0  # over the logits in fp32: temperature, softmax, top-p, choice


@dataclass(frozen=True, slots=True)
class Serving:
    """Prefill, decoding, or both.

    tp, pp : tensor parallel ranks, inside a node, and pipeline stages, over nodes.
    phase : prefill (``batch`` prompts of ``seq`` tokens), decode (one token for each of ``batch``
        sequences, with ``seq`` tokens in the cache) or generate (prompts of ``seq`` tokens, then
        ``output`` tokens of each).
    output : tokens that are generated for each sequence (generate; otherwise 0).
    all_reduce : engine (its own kernel where NCCL is slower) or nccl, of the unfused baseline.
    grouped_queries : whether decoding reads keys and values once for all queries that share them.
        Engines of 2023 read most of them for each query (TensorRT-LLM before its XQA kernel).
    """

    model: Model
    tp: int = 4
    phase: str = "prefill"
    batch: int = 8
    seq: int = 2048
    pp: int = 1
    output: int = 0
    all_reduce: str = "engine"
    grouped_queries: bool = True

    def __post_init__(self) -> None:
        require(
            (self.phase == "generate") == (self.output > 0),
            f"output {self.output} in phase {self.phase}",
            "above 0 in generate, 0 in prefill and decode",
            "give output, or leave it out",
        )

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp

    @property
    def longest(self) -> int:
        """Tokens in the cache of a sequence at the end."""
        return self.seq + self.output


FIELDS = fields_of(
    Serving,
    model=model_reader,
    tp=integer(1, 64),
    phase=choice(("prefill", "decode", "generate")),
    batch=integer(1, 65536),
    seq=integer(1, 1 << 24),
    pp=integer(1, 1024),
    output=integer(0, 1 << 24, "tokens"),
    all_reduce=choice(("engine", "nccl")),
    grouped_queries=flag,
)


def by_name(model: str, **fields: Any) -> Serving:
    """Serving of a published model."""
    return Serving(known_model(model), **checked(fields, FIELDS))


class EngineOperators(Operators):
    """Operators whose unfused all-reduces inside a node are an engine's own where NCCL is
    slower."""

    def collective(
        self, kind: Any, nbytes: float, group: Group, algorithm: Any = "auto", slices: int = 1
    ) -> float:
        nccl = super().collective(kind, nbytes, group, algorithm, slices)
        if kind != "all_reduce" or group.across > 1 or group.size == 1:
            return nccl
        return min(nccl, self.own_all_reduce(nbytes, group.size))

    def own_all_reduce(self, nbytes: float, world: int) -> float:
        """Seconds of one launch in which each rank reads the vectors of all, or its share of them
        and then the sums: as vLLM's custom all-reduce does, by the rates of tileweave's launch."""
        seen = view(self._node(world), self.c.exchange_fraction)
        loads = seen.loads(inside_hops(seen.cluster, 1), world - 1.0)
        if seen.cluster.device.inside == "mesh":
            loads["pair1"] /= world - 1.0
        whole = max(nbytes * load / seen.capacities[link] for link, load in loads.items())
        latency = self.c.exchange_latency
        return self.c.gap + min(latency + whole, 2.0 * (latency + whole / world))


def operators(
    serving: Serving, cluster: Cluster, calibration: Any = None, kernels: bool = True
) -> Operators:
    """The operators of a replica. Decoding is replayed from a CUDA graph."""
    kind = EngineOperators if serving.all_reduce == "engine" else Operators
    return kind(cluster, calibration, serving.phase != "prefill", False, kernels)


def simulate(
    serving: Serving, cluster: Cluster, ops: Operators, mode: Mode, fuse: Any = None
) -> Timeline:
    """One prefill, one decoding step, or whole requests, of one replica."""
    return _Builder(serving, cluster, ops, mode, fuse).build()


class _Builder:
    def __init__(
        self, serving: Serving, cluster: Cluster, ops: Operators, mode: Mode, fuse: Any
    ) -> None:
        self.s, self.model, self.cluster, self.ops = serving, serving.model, cluster, ops
        s = serving
        require(
            s.tp <= cluster.gpus_per_node,
            f"tp {s.tp}",
            f"at most the {cluster.gpus_per_node} GPUs of a node",
            "lower tp, and use pp over nodes",
        )
        require(
            s.pp == 1 or cluster.gpus_per_node % s.tp == 0,
            f"tp {s.tp} with pp {s.pp}",
            f"a divisor of the {cluster.gpus_per_node} GPUs of a node",
            "change tp",
        )
        require(
            s.gpus <= cluster.world_size,
            f"tp {s.tp} x pp {s.pp}",
            f"at most the {cluster.world_size} GPUs of the cluster",
            "lower pp, or more nodes",
        )
        require(s.pp <= s.model.layers, f"pp {s.pp}", f"at most {s.model.layers}", "lower pp")
        self.layer = Layer(s.model, ops, s.tp, mode, fuse)
        self.seen = view(cluster, bulk(ops.c).fraction)
        pipeline = f", pp {s.pp}" if s.pp > 1 else ""
        what = f"{s.batch} x {s.seq}" + (f" + {s.output}" if s.output else "")
        self.step = Step(f"{s.model.name}, {s.phase} of {what}, tp {s.tp}{pipeline}: {mode}")

    def build(self) -> Timeline:
        s = self.s
        for stage in range(s.pp):
            first = stage * s.tp
            name = f"ranks {first} to {first + s.tp - 1}"
            self.step.representative(stage, s.tp, name, self.seen.capacities)
        if s.phase == "decode":
            self._decode(s.seq, 1.0)
        else:
            self._prefill()
        if s.output > 1:  # the first token is that of the prefill
            self._decode(s.seq + s.output // 2, s.output - 1.0)
        return self.step.run()

    def _prefill(self) -> None:
        """Prompts in as many micro-batches as there are stages."""
        pieces = min(self.s.pp, self.s.batch)
        for piece in range(pieces):
            count = self.s.batch * (piece + 1) // pieces - self.s.batch * piece // pieces
            parts = self._prefill_parts(count)
            self._through_stages(f"prefill {piece}", parts, count, count * self.s.seq, 1.0)

    def _decode(self, context: int, tokens: float) -> None:
        """``tokens`` of each sequence. With stages, a micro-batch of them passes all stages, while
        the other micro-batches are in the other stages."""
        count = max(-(-self.s.batch // self.s.pp), 1)
        parts = self._decode_parts(count, context)
        self._through_stages("decode", parts, count, count, tokens)

    def _through_stages(
        self, name: str, layer: list[Part], count: int, rows: int, times: float
    ) -> None:
        """Each layer ``times`` times, stage after stage, then what follows the last layer."""
        parts = [_scaled(part, times) for part in layer]
        after: list[int] = []
        layers, pp = self.model.layers, self.s.pp
        for stage in range(pp):
            for number in range(layers * stage // pp, layers * (stage + 1) // pp):
                title = f"{name}, layer {number}"
                after = [self.step.add(stage, "compute", title, parts, after)]
            if stage < pp - 1:
                after = [self._send(stage, rows, times, after)]
        ending = [_scaled(part, times) for part in self._ending(count)]
        self.step.add(pp - 1, "compute", f"{name}, head", ending, after)

    def _send(self, stage: int, rows: int, times: float, after: list[int]) -> int:
        nbytes = rows * self.model.hidden * 2.0 / self.s.tp * times
        first, other = stage * self.s.tp, (stage + 1) * self.s.tp
        late = bulk(self.ops.c).latency * times
        make = lambda: between(  # noqa: E731
            message(self.seen, nbytes, first, other, late), stage, stage + 1
        )
        part = Part("send", "pipeline", 0.0, 0.0, "send", nbytes, 2, "pp")
        return self.step.add(stage, "to next", "send", [part], after, "comm", make, stage + 1)

    def _ending(self, count: int) -> list[Part]:
        """Logits of the last token of ``count`` sequences, their gather, the choice of tokens, and
        the host."""
        layer, costs, tp = self.layer, self.ops.costs, self.s.tp
        head = layer.local_column("head", count, layer.words, self.model.hidden, "head")
        nbytes = count * layer.words * 2.0
        gather = self.ops.collective("all_gather", nbytes, Group(tp)) if tp > 1 else 0.0
        logits = Part(
            "gather of logits", "head", gather, gather, "all_gather", nbytes, tp, "tp", 0.0
        )
        sampling = costs.stream(SAMPLING_PASSES * 4.0 * count * self.model.vocab)
        return [
            head,
            *([logits] if tp > 1 else []),
            layer.plain("sampling", "sampling", sampling),
            layer.plain("host", "host", HOST),
        ]

    def _prefill_parts(self, count: int) -> list[Part]:
        """Unfused: row-parallel matmuls end with an all-reduce, as in serving engines. Fused: with
        an all-reduce, or with rows scattered and gathered, whichever is faster."""
        rows = count * self.s.seq
        reduced = self.layer.forward(rows, self.s.seq, sequence_parallel=False)
        found = [reduced]
        if self.layer.replans:
            found.append(self.layer.forward(rows, self.s.seq))
        best = min(found, key=lambda parts: sum(part.seconds for part in parts))
        return [*best, self.layer.plain("other kernels", "elementwise", LAYER_PREFILL)]

    def _decode_parts(self, count: int, context: int) -> list[Part]:
        model, layer = self.model, self.layer
        columns = max(model.kv_heads / layer.tp, 1.0) * model.head_dim
        times = 1.0
        if not self.s.grouped_queries:
            times += READ_AGAIN * (model.heads / model.kv_heads - 1.0)
        attention = self.ops.costs.stream(times * 2.0 * 2.0 * count * context * columns)
        return [
            layer.norm(count),
            layer.local_column("qkv", count, model.qkv, model.hidden),
            layer.plain("attention", "attention", attention),
            layer.row("proj", count, model.hidden, model.hidden, "all_reduce"),
            layer.norm(count),
            layer.local_column("fc1", count, model.up, model.hidden),
            layer.activation(count),
            layer.row("fc2", count, model.hidden, model.ffn, "all_reduce"),
            layer.plain("waits of ranks", "elementwise", LAYER_DECODE * math.log2(self.s.tp)),
        ]


def _scaled(part: Part, times: float) -> Part:
    """A part that is repeated ``times`` times."""
    return (
        part
        if times == 1.0
        else replace(
            part,
            seconds=part.seconds * times,
            exposed=part.exposed * times,
            nbytes=part.nbytes * times,
            compute=part.compute * times,
        )
    )
