"""Samples of grouped_matmul_combine; see ``expert_cases.py`` for shapes."""

from __future__ import annotations

from tileweave.bench.expert_subject import GroupedMatmulCombine
from tileweave.bench.experts import samples

SAMPLES = samples(GroupedMatmulCombine(), (1.7, 1.4, 1.08))
