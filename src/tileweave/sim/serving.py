"""Serving a transformer: one prefill of a batch, or one decoding step, tensor parallel inside a
node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tileweave.errors import require
from tileweave.sim.document import REQUIRED, Reader, checked, choice, integer
from tileweave.sim.machine import Cluster
from tileweave.sim.operators import Mode, Operators
from tileweave.sim.step import Part, Step, Timeline
from tileweave.sim.transformer import Layer, Model, known_model, model_reader


@dataclass(frozen=True, slots=True)
class Serving:
    """One prefill or decoding step.

    phase : prefill (``batch`` prompts of ``seq`` tokens) or decode (one token for each of
        ``batch`` sequences, with ``seq`` tokens in the cache).
    """

    model: Model
    tp: int = 4
    phase: str = "prefill"
    batch: int = 8
    seq: int = 2048


FIELDS: dict[str, tuple[Reader, Any]] = {
    "model": (model_reader, REQUIRED),
    "tp": (integer(1, 64), 4),
    "phase": (choice(("prefill", "decode")), "prefill"),
    "batch": (integer(1, 65536), 8),
    "seq": (integer(1, 1 << 24), 2048),
}


def by_name(model: str, **fields: Any) -> Serving:
    """Serving of a published model."""
    return Serving(known_model(model), **checked(fields, FIELDS))


def simulate(
    serving: Serving, cluster: Cluster, ops: Operators, mode: Mode, fuse: Any = None
) -> Timeline:
    """One prefill, or one decoding step, of one replica of ``tp`` ranks."""
    s, model = serving, serving.model
    require(
        s.tp <= cluster.gpus_per_node,
        f"tp {s.tp}",
        f"at most the {cluster.gpus_per_node} GPUs of a node",
        "lower tp",
    )
    layer = Layer(model, ops, s.tp, mode, fuse)
    parts = _prefill(s, layer) if s.phase == "prefill" else _decode(s, layer)
    rows = s.batch
    head = layer.local_column("head", rows, layer.words, model.hidden, "head")
    step = Step(f"{model.name}, {s.phase} of {s.batch} x {s.seq}, tp {s.tp}: {mode}")
    step.representative(0, s.tp, f"ranks 0 to {s.tp - 1}", {})
    for number in range(model.layers):
        step.add(0, "compute", f"layer {number}", parts)
    step.add(0, "compute", "head", [head])
    return step.run()


def _prefill(s: Serving, layer: Layer) -> list[Part]:
    """Unfused: row-parallel matmuls end with an all-reduce, as in serving engines. Fused: with an
    all-reduce, or with rows scattered and gathered, whichever is faster."""
    rows = s.batch * s.seq
    reduced = layer.forward(rows, s.seq, sequence_parallel=False)
    if not layer.replans:
        return reduced
    scattered = layer.forward(rows, s.seq)
    return min(reduced, scattered, key=lambda parts: sum(part.seconds for part in parts))


def _decode(s: Serving, layer: Layer) -> list[Part]:
    model, m = s.model, s.batch
    reads = 2.0 * s.batch * s.seq * max(model.kv_heads / layer.tp, 1.0) * model.head_dim * 2.0
    attention = layer.plain("attention", "attention", layer.ops.costs.stream(reads))
    return [
        layer.norm(m),
        layer.local_column("qkv", m, model.qkv, model.hidden),
        attention,
        layer.row("proj", m, model.hidden, model.hidden, "all_reduce"),
        layer.norm(m),
        layer.local_column("fc1", m, model.up, model.hidden),
        layer.activation(m),
        layer.row("fc2", m, model.hidden, model.ffn, "all_reduce"),
    ]
