"""Samples of dispatch_grouped_matmul; see ``expert_cases.py`` for shapes."""

from __future__ import annotations

from tileweave.bench.expert_subject import DispatchGroupedMatmul
from tileweave.bench.experts import samples

SAMPLES = samples(DispatchGroupedMatmul(), (1.5, 1.3, 1.05))
