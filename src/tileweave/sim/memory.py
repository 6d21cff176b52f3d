"""What fills a GPU's memory, and whether it fits.

Training: weights, gradients and the optimizer's state by Megatron's rules (its distributed
optimizer: 6 + 12/d bytes per parameter with gradients in fp32), activations as in arXiv 2205.05198,
counted for any decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tileweave.sim.dlrm import Dlrm
from tileweave.sim.machine import Cluster, Device
from tileweave.sim.moe import MoE
from tileweave.sim.schedules import in_flight
from tileweave.sim.serving import Serving
from tileweave.sim.training import Training, plan
from tileweave.sim.transformer import Model

# Bytes that a process has no tensors in: the CUDA context, NCCL's buffers, cuBLAS's workspaces, and
# what the allocator loses to fragments. (By these rules the four models of arXiv 2205.05198, figure
# 1, need 2 to 5 % more than was measured there.)
RESERVED = 3e9


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes per GPU by what they are, of the rank that needs most."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])

    def fits(self, device: Device) -> bool:
        return self.total <= usable(device)

    def text(self) -> str:
        """Such as ``71.0 GB: 41.2 activations, 20.1 weights``, the largest first."""
        ordered = sorted(self.parts.items(), key=lambda part: -part[1])
        listed = ", ".join(f"{value / 1e9:.1f} {name}" for name, value in ordered if value >= 5e7)
        return f"{self.total / 1e9:.1f} GB" + (f": {listed}" if listed else "")


def usable(device: Device) -> float:
    """Bytes that tensors may take."""
    return device.memory - RESERVED


def kv_cache(layers: int, kv_columns: float, tokens: float) -> float:
    """Bytes of keys and values, of 16 bits, of ``tokens`` tokens in ``layers`` layers.
    ``kv_columns``: of the keys that one rank has; the values have as many."""
    return 2.0 * 2.0 * layers * kv_columns * tokens


def training_memory(training: Training, cluster: Cluster) -> Memory:
    """Of the first or the last pipeline stage, whichever needs more."""
    found = plan(training, cluster)
    stages = {0, training.pp - 1}
    each = [
        _stage(training, found.dp * training.context_parallel, found.micro_batches, stage, layers)
        for stage, layers in ((stage, sum(found.layers[stage])) for stage in stages)
    ]
    return max(each, key=lambda memory: memory.total)


def _stage(t: Training, shards: int, micro_batches: int, stage: int, layers: int) -> Memory:
    model, last = t.model, stage == t.pp - 1
    words = model.vocab * model.hidden * ((stage == 0) + last)
    parameters = (layers * model.layer_parameters + words) / t.tp
    share = {name: shards if name in _SHARED[t.sharding] else 1 for name in _SHARED["parameters"]}
    # a layer of gathered parameters that is computed, one that comes, and one of gradients
    whole = 3 * model.layer_parameters / t.tp if t.sharding == "parameters" else 0.0
    kept = in_flight(t.pp, micro_batches, t.virtual_pipeline)
    if t.virtual_pipeline == 1:
        kept = min(float(t.pp - stage), float(micro_batches))
    full = t.recompute == "full"
    one = activation_bytes(t) if not full else 2.0 * t.rows * model.hidden / _sharded(t)
    activations = kept * layers * one
    if full:  # what is computed again, of one layer
        activations += activation_bytes(t, selective=False)
    if last:  # logits in bf16, and their softmax in fp32
        activations += 6.0 * t.rows * model.vocab / t.tp
    return Memory(
        {
            "weights": 2.0 * (parameters / share["parameters"] + whole),
            "gradients": t.gradient_bytes * parameters / share["gradients"],
            "optimizer": 12.0 * parameters / share["optimizer"],
            "activations": activations,
        }
    )


_SHARED: dict[str, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("optimizer",),
    "gradients": ("optimizer", "gradients"),
    "parameters": ("optimizer", "gradients", "parameters"),
}


def _sharded(t: Training) -> int:
    """Into how many parts the rows between matmuls are divided."""
    return t.tp if t.sequence_parallel else 1


def activation_bytes(t: Training, selective: bool | None = None) -> float:
    """Bytes of one layer and micro-batch that are kept for the backward, in bf16: the input of each
    norm and matmul, queries, keys and values, the input of the activation; with unfused attention
    dropout's masks, and the scores unless they are recomputed."""
    model, rows = t.model, float(t.rows)
    between = 8.0 * model.hidden  # inputs of two norms, and what they give to two matmuls
    inner = 2.0 * (model.qkv + model.hidden + model.up + model.ffn)
    scores = 0.0
    if t.attention == "unfused":
        between += 2.0 * model.hidden
        if not (t.recompute == "selective" if selective is None else selective):
            scores = 5.0 * model.heads * t.tokens
    return rows * (between / _sharded(t) + (inner + scores) / t.tp)


def serving_memory(serving: Serving, cluster: Cluster) -> Memory:
    """Weights and KV cache of one rank, and what one step has at once. Of the first or the last
    pipeline stage, which have the same number of layers or one more than others."""
    model, tp = serving.model, serving.tp
    layers = -(-model.layers // serving.pp)
    words = model.vocab * model.hidden * (2 if serving.pp == 1 else 1)
    columns = max(model.kv_heads / tp, 1.0) * model.head_dim
    rows = serving.batch * (1 if serving.phase == "decode" else serving.seq)
    tokens = float(serving.batch) * serving.longest
    return Memory(
        {
            "weights": 2.0 * (layers * model.layer_parameters + words) / tp,
            "KV cache": kv_cache(layers, columns, tokens),
            # engines prefill in pieces of some 8,192 tokens
            "activations": 2.0 * min(rows, 8192) * _widest(model, tp),
        }
    )


def most_sequences(serving: Serving, cluster: Cluster) -> int:
    """Of how many sequences a replica has room for keys and values; 0 where not even the weights
    fit."""
    parts = serving_memory(serving, cluster).parts
    one = parts["KV cache"] / serving.batch
    room = usable(cluster.device) - sum(parts.values()) + parts["KV cache"]
    return max(int(room / one), 0)


def _widest(model: Model, tp: int) -> float:
    """Columns that a step has at once: the residual twice, inputs and results of the MLP."""
    return 2.0 * model.hidden + (model.up + model.ffn) / tp


def moe_memory(moe: MoE, cluster: Cluster) -> Memory:
    """Experts of one rank; what every rank has: attention, shared experts, dense layers, and the
    embedding and head where the model says its vocabulary; the KV cache of its own tokens."""
    model = moe.model
    local = max(moe.experts / (moe.ep or cluster.world_size), 1.0)
    itemsize = 1.0 if moe.fp8 else 2.0
    expert, routed = 3.0 * model.ffn * model.hidden, model.layers - model.dense_layers
    dense = 3.0 * model.dense_layers * model.dense_ffn * model.hidden
    tokens = float(moe.tokens) * (moe.seq if moe.phase == "decode" else 1)
    rows = moe.tokens / (2 if moe.two_batch else 1)
    parts = {
        "experts": itemsize * routed * local * expert,
        "attention": itemsize * model.layers * model.attention_parameters,
        "shared and dense": itemsize * (routed * model.shared * expert + dense),
        "embedding and head": 2.0 * 2.0 * model.vocab * model.hidden,
        "KV cache": kv_cache(model.layers, model.cached / 2.0, tokens),
        "activations": 2.0 * rows * (2.0 * model.hidden + 3.0 * model.top_k * model.ffn),
    }
    return Memory({name: value for name, value in parts.items() if value})


def dlrm_memory(work: Dlrm, cluster: Cluster) -> Memory:
    """The tables of one rank."""
    model, world = work.model, cluster.world_size
    tables = model.count(world) * model.rows * model.dim * model.itemsize
    return Memory({"tables": tables / world})


_OF: dict[type, Callable[[Any, Cluster], Memory]] = {
    Training: training_memory,
    Serving: serving_memory,
    MoE: moe_memory,
    Dlrm: dlrm_memory,
}


def memory_of(work: Training | Serving | MoE | Dlrm, cluster: Cluster) -> Memory:
    """What fills the memory of a GPU in this workload. Raises like the simulation where degrees do
    not fit the cluster."""
    return _OF[type(work)](work, cluster)
