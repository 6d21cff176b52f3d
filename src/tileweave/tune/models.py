"""The matmuls of published models under tensor parallelism, by operator.

A layer has four: of queries, keys and values; of the attention's output; of gate and up; of down.
The first and third have their columns split over ranks, the others their K. Sizes are those of the
configurations that the models were published with. Of mixtures of experts only the attention is
here: experts have operators of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tileweave.bench.cases import Case
from tileweave.bench.samples import samples_of

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Model:
    """``ffn``: columns of gate, and K of down; 0 for a mixture of experts."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def attention(self) -> int:
        """Columns of all queries, which are K of the output."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        return self.attention + 2 * self.kv_heads * self.head_dim


MODELS = {
    "llama3-8b": Model(4096, 14336, 32, 8),
    "llama3-70b": Model(8192, 28672, 64, 8),
    "llama3-405b": Model(16384, 53248, 128, 8),
    "qwen2.5-7b": Model(3584, 18944, 28, 4),
    "qwen2.5-72b": Model(8192, 29568, 64, 8),
    "qwen3-8b": Model(4096, 12288, 32, 8),
    "qwen3-32b": Model(5120, 25600, 64, 8),
    "mistral-7b": Model(4096, 14336, 32, 8),
    "gemma2-27b": Model(4608, 36864, 32, 16),
    "mixtral-8x7b": Model(4096, 0, 32, 8),
    "mixtral-8x22b": Model(6144, 0, 48, 8),
    "qwen3-235b": Model(4096, 0, 64, 4),
}


def _layers(op: str, model: Model) -> dict[str, tuple[int, int]]:
    """(N, K) of the layers that ``op`` computes. Exchanges are around attention, with whole
    weights."""
    samples = samples_of(op)
    if "cols" in samples.shared:
        layers = {"qkv": (model.qkv, model.hidden), "gate-up": (2 * model.ffn, model.hidden)}
    else:
        layers = {"o": (model.hidden, model.attention), "down": (model.hidden, model.ffn)}
    of_attention = bool(samples.subject.options) or not model.ffn
    return dict([*layers.items()][:1]) if of_attention else layers


def cases_of(op: str, name: str, rows: tuple[int, ...], dtype: str) -> list[Case]:
    """The matmuls of model ``name`` that ``op`` computes, with each number of rows."""
    return [
        Case(op, f"{name}-{layer}-m{m}", m, n, k, m <= 1024, "large", dtype)
        for m in rows
        for layer, (n, k) in _layers(op, MODELS[name]).items()
    ]
