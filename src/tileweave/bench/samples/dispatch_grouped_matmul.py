"""Samples of dispatch_grouped_matmul; see ``expert_cases.py`` for shapes."""

from __future__ import annotations

from tileweave.bench import expert_cases, random_cases
from tileweave.bench.expert_subject import DispatchGroupedMatmul
from tileweave.bench.experts import BENCHED, ExpertRivals
from tileweave.bench.samples import Samples

OP = "dispatch_grouped_matmul"
SAMPLES = Samples(
    subject=DispatchGroupedMatmul(),
    check_on_gpu=expert_cases.CHECKED_ON_GPU,
    check_on_cpu=expert_cases.CHECKED_ON_CPU,
    stress_on_gpu=expert_cases.STRESSED_ON_GPU,
    stress_on_cpu=expert_cases.STRESSED_ON_CPU,
    demo=expert_cases.demo_of(OP),
    bench=BENCHED,
    cases=expert_cases.cases(OP, (1.5, 1.3, 1.05)),
    smoke=expert_cases.smoke(OP),
    quick=expert_cases.QUICK,
    rival=ExpertRivals,
    traced=((16, 64, 32), (4096, 4096, 4096)),
    self_signaling=True,
    random=random_cases.experts(OP),
)
