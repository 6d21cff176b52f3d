"""Cases of the expert operators: layers of published models at prefill, under skew, and at decode.
Plain data."""

from __future__ import annotations

from dataclasses import dataclass

DISPATCH, COMBINE = "dispatch_grouped_matmul", "grouped_matmul_combine"
# hidden, an expert's width, experts, choices of a token
MODELS = {
    "qwen3-235b": (4096, 1536, 128, 8),
    "deepseek-v3": (7168, 2048, 256, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
}


@dataclass(frozen=True, slots=True)
class ExpertCase:
    """``tokens`` a rank; ``experts`` of all ranks. ``zipf``: experts are chosen by Zipf's law of
    exponent 1, else alike.

    ``bar``: how many times faster than unfused, at least.
    """

    op: str
    name: str
    tokens: int
    hidden: int
    width: int
    experts: int
    topk: int
    bar: float
    zipf: bool = False
    graph: bool = False
    block: str = "prefill"
    dtype: str = "bfloat16"

    @property
    def cols(self) -> int:
        """Columns of the matmul: gate and up together, or the hidden size."""
        return 2 * self.width if self.op == DISPATCH else self.hidden

    @property
    def depth(self) -> int:
        return self.hidden if self.op == DISPATCH else self.width


def _cases(op: str, bars: tuple[float, float, float]) -> list[ExpertCase]:
    prefill = [
        ("qwen3-235b", 4096, bars[0]),
        ("deepseek-v3", 1024, bars[1]),
        ("deepseek-v3", 4096, bars[1]),
        ("mixtral-8x7b", 4096, bars[2]),
    ]
    cases = [
        ExpertCase(op, f"{model}-t{tokens}", tokens, *MODELS[model], bar)
        for model, tokens, bar in prefill
    ]
    cases += [
        ExpertCase(op, f"{model}-t4096-zipf", 4096, *MODELS[model], 1.0, zipf=True)
        for model in ("qwen3-235b", "deepseek-v3")
    ]
    return cases + [
        ExpertCase(
            op, f"{model}-t{tokens}", tokens, *MODELS[model], 1.1, graph=True, block="decode"
        )
        for model in ("qwen3-235b", "deepseek-v3")
        for tokens in (1, 8, 32, 128)
    ]


CASES = {DISPATCH: _cases(DISPATCH, (1.5, 1.3, 1.05)), COMBINE: _cases(COMBINE, (1.7, 1.4, 1.08))}
SMOKE = {
    op: [
        ExpertCase(op, "smoke-even", 4, 16, 16, 4, 2, 0.0, block="smoke", dtype="float32"),
        ExpertCase(
            op, "smoke-zipf", 3, 24, 16, 4, 2, 0.0, zipf=True, block="smoke", dtype="float16"
        ),
    ]
    for op in CASES
}
QUICK = r"(qwen3-235b-t(4096|1|128)|deepseek-v3-t1024|mixtral-8x7b-t4096)$"
