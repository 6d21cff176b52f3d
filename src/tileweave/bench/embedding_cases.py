"""Cases of embedding_bag_all_to_all.

Uniform indices over tables far larger than the L2, and the multi-hot sizes of MLPerf.
"""

from __future__ import annotations

from dataclasses import dataclass

from tileweave.planning.sharding import TableSpec

OP = "embedding_bag_all_to_all"
# MLPerf DLRM-v2
MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


@dataclass(frozen=True, slots=True)
class EmbeddingCase:
    """``tables`` per rank of ``rows`` x ``dim``, global ``batch``, bags of ``pooling`` rows.

    ``multi_hot``: the 26 tables of MLPerf, placed by a sharding plan.
    """

    name: str
    dtype: str
    batch: int
    pooling: int
    dim: int = 128
    tables: int = 8
    rows: int = 2_000_000
    multi_hot: bool = False
    graph: bool = False
    block: str = "large"
    op: str = OP

    def specs(self, world_size: int) -> list[TableSpec]:
        if self.multi_hot:
            return [TableSpec(f"t{i}", self.rows, self.dim, n) for i, n in enumerate(MULTI_HOT)]
        return [
            TableSpec(f"t{i}", self.rows, self.dim, self.pooling)
            for i in range(self.tables * world_size)
        ]


def _case(dtype: str, batch: int, pooling: int, dim: int = 128) -> EmbeddingCase:
    short = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    name = f"{short}-b{batch}-l{pooling}" + ("" if dim == 128 else f"-d{dim}")
    graph = batch <= 8192 or pooling == 1  # otherwise host time dominates
    return EmbeddingCase(
        name, dtype, batch, pooling, dim, graph=graph, block="main" if "l8" in name else "large"
    )


CASES = [
    _case("float32", 65536, 8),
    _case("bfloat16", 65536, 8),
    *(
        _case(dtype, 65536, pooling)
        for pooling in (1, 4, 20, 32)
        for dtype in ("float32", "bfloat16")
    ),
    _case("float32", 8192, 8),
    _case("bfloat16", 8192, 8),
    _case("float32", 8192, 1),
    _case("bfloat16", 65536, 8, 64),
    _case("float32", 65536, 8, 256),
    EmbeddingCase("fp32-dlrm-v2", "float32", 65536, 8, multi_hot=True, rows=1_000_000),
    EmbeddingCase("bf16-dlrm-v2", "bfloat16", 65536, 8, multi_hot=True, rows=1_000_000),
]
SMOKE = [
    EmbeddingCase("smoke-fp32", "float32", 7, 2, 16, 2, 50, block="smoke"),
    EmbeddingCase("smoke-multi-hot", "float16", 3, 2, 8, 2, 120, multi_hot=True, block="smoke"),
]
QUICK = r"(fp32|bf16)-b65536-l(8|1)$|fp32-b8192-l8$|fp32-dlrm"
