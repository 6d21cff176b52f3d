"""Random cases of the benches: ``tileweave bench OP --random N --seed S``.

Named cases say how an operator does on shapes that it was tuned for; random ones, how it does
elsewhere. Each operator draws from a stream of its own, which depends on its name and the seed
alone: the same cases on every machine, and the first N of a longer run. Sizes are spread evenly on
a logarithmic scale where small and large ones matter alike.

=================  ================================================================================
matmuls            M from 1 to 2^13.5 rows, an even number (matmul_all_reduce: to 2^14, any
                   number); N and K multiples of 64 from 512 to 28,672, halved where M N K is above
                   2^42; in a CUDA graph up to 1024 rows
experts            1 to 8,192 tokens per rank; hidden size 1,024 to 8,192 and width 512 to 14,336 in
                   steps of 64; 8 to 384 experts in steps of 8; k from 1 to 8; every second case
                   chooses experts uniformly, the others by Zipf's law with an exponent of up to
                   1.5. Narrower experts, or fewer tokens, where memory or time would not
                   suffice; in a CUDA graph up to 128 tokens
embedding bags     64 to 131,072 samples, 1 to 32 tables per rank of 1,024 to 4 million rows and
                   32 to 256 columns, bags of 1 to 64 rows; fp32 or bf16. Fewer rows or samples
                   where memory would not do; in a CUDA graph up to 8,192 samples, or bags of one
=================  ================================================================================
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tileweave.bench.cases import Case
from tileweave.bench.embedding_cases import EmbeddingCase
from tileweave.bench.expert_cases import ExpertCase

Drawn = Callable[[int, int, bool], list]
_MOST_PRODUCTS = 2**42  # multiply-adds of a matmul
_MOST_WEIGHTS = 2**32  # elements of one matmul's experts, on all ranks
_MOST_ACTIVATIONS = 2**30  # elements of one rank's choices, before or after the matmul
_MOST_PRODUCTS_OF_EXPERTS = 2**41
_MOST_TABLE_BYTES = 2**34  # of one rank
_MOST_INDICES = 2**26  # of one rank, of which there are three sets
_MOST_POOLED = 2**28  # elements of one rank's pooled rows


def stream(op: str, seed: int) -> random.Random:
    """The random numbers of one operator, the same for every version of Python."""
    return random.Random(f"{op} {seed}")


def _octaves(rng: random.Random, low: float, high: float) -> int:
    """A size from 2^low to 2^high, evenly on a logarithmic scale."""
    return int(2 ** rng.uniform(low, high))


def matmuls(op: str, most_rows: float = 13.5, even: bool = True) -> Drawn:
    """Draws of a matmul operator with up to 2^``most_rows`` rows; ``even``: no odd M."""

    def draw(count: int, seed: int, smoke: bool = False) -> list[Case]:
        rng, cases = stream(op, seed), []
        for _ in range(count):
            if smoke:
                m, n, k = _octaves(rng, 0, 5), 32 * rng.randint(1, 4), 32 * rng.randint(1, 3)
            else:
                m = _octaves(rng, 0, most_rows)
                n, k = 64 * rng.randint(8, 448), 64 * rng.randint(8, 448)
                if m * n * k > _MOST_PRODUCTS:
                    n, k = n // 2 // 64 * 64, k // 2 // 64 * 64
            m = max(2, m - m % 2) if even else m
            graph, block = m <= 1024 and not smoke, "small" if m <= 1024 else "large"
            name, dtype = f"rnd-{m}-{n}-{k}", "float32" if smoke else "bfloat16"
            cases.append(Case(op, name, m, n, k, graph, "smoke" if smoke else block, dtype))
        return cases

    return draw


def experts(op: str) -> Drawn:
    """Draws of an expert operator."""

    def draw(count: int, seed: int, smoke: bool = False) -> list[ExpertCase]:
        rng, cases = stream(op, seed), []
        for _ in range(count):
            tokens = _octaves(rng, 0, 3 if smoke else 13)
            hidden = 8 * rng.randint(2, 4) if smoke else 64 * rng.randint(16, 128)
            width = 8 * rng.randint(2, 4) if smoke else 64 * rng.randint(8, 224)
            number = 8 if smoke else min(8 * _octaves(rng, 0, 5.6), 384)
            topk = rng.randint(1, 2 if smoke else min(8, number // 2))
            skew = round(rng.uniform(0.0, 1.5), 2) if rng.random() < 0.5 else 0.0
            if not smoke:
                fits = _MOST_WEIGHTS // (2 * hidden * number)
                width = min(width, max(fits // 64 * 64, 64))
                choice = topk * max(hidden, 2 * width)
                products = topk * 2 * width * hidden
                most = min(_MOST_ACTIVATIONS // choice, _MOST_PRODUCTS_OF_EXPERTS // products)
                tokens = min(tokens, most)
            graph = tokens <= 128 and not smoke
            cases.append(
                ExpertCase(
                    op,
                    f"rnd-t{tokens}-h{hidden}-w{width}-e{number}-k{topk}-z{skew:g}",
                    tokens,
                    hidden,
                    width,
                    number,
                    topk,
                    bar=1.0,
                    zipf=skew,
                    graph=graph,
                    block="smoke" if smoke else "decode" if graph else "prefill",
                    dtype="float32" if smoke else "bfloat16",
                )
            )
        return cases

    return draw


def embedding_bags(op: str) -> Drawn:
    """Draws of embedding_bag_all_to_all."""

    def draw(count: int, seed: int, smoke: bool = False) -> list[EmbeddingCase]:
        rng, cases = stream(op, seed), []
        for _ in range(count):
            dtype = rng.choice(("float32", "bfloat16"))
            batch = _octaves(rng, *((3, 5) if smoke else (6, 17)))
            tables = rng.randint(1, 2 if smoke else 32)
            rows = _octaves(rng, *((3, 6) if smoke else (10, 22)))
            dim = 8 if smoke else 32 * rng.randint(1, 8)
            pooling = _octaves(rng, 0, 1 if smoke else 6)
            dtype = "float32" if smoke else dtype
            rows = min(rows, _MOST_TABLE_BYTES // (tables * dim * (4 if dtype == "float32" else 2)))
            most = min(_MOST_INDICES // (tables * pooling), _MOST_POOLED // (tables * dim))
            batch = min(batch, most)
            graph = (batch <= 8192 or pooling == 1) and not smoke
            short = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
            name = f"rnd-{short}-b{batch}-t{tables}-r{rows}-d{dim}-l{pooling}"
            cases.append(
                EmbeddingCase(
                    name,
                    dtype,
                    batch,
                    pooling,
                    dim,
                    tables,
                    rows,
                    graph=graph,
                    block="smoke" if smoke else "large",
                    op=op,
                )
            )
        return cases

    return draw
