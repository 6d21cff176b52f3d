"""FLUX's model-level table (arXiv 2406.06858, section 5.2) next to ours, with the reason of each
difference by ablation.

Theirs are the best gains of GPT-3 175B and Llama-2 70B: a step of training on 128 GPUs (TP 8, PP 8,
DP 2) over Megatron-LM, a prefill of 8 x 2,048 tokens and a decoding step of 64 or 512 sequences
over vLLM 0.2.1, both TP 8. The global batch and the tokens in the cache are not published: 256
samples, and 512 tokens, with which as many sequences as possible fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from tileweave.planning.costs import Calibration
from tileweave.sim import serving, training
from tileweave.sim.machine import Cluster, Network, make_cluster
from tileweave.sim.memory import memory_of
from tileweave.sim.workload import Scenario, simulate_all

CLOSE = 0.08
# NICs of a node and their rates, section 5; mean overlap of FLUX over all shapes, section 6.
_MACHINES = {
    "a100-pcie": (2, 12.5e9, 0.40),
    "a100": (4, 25e9, 0.63),
    "h800": (8, 50e9, 0.72),
}
# Gains over Megatron-LM and vLLM; 1.0: none.
PUBLISHED = {
    "training": {"a100-pcie": 1.24, "a100": 1.05, "h800": 1.10},
    "prefill": {"a100-pcie": 1.46, "a100": 1.45, "h800": 1.66},
    "decode": {"a100-pcie": 1.28, "a100": 1.30, "h800": 1.00},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One published gain and ours: time of the baseline over that with fused operators.

    bound : as if operators were at their bound, the longer of computation and traffic.
    theirs : as if that part of communication were hidden that FLUX hides there on average.
    free : as if communication inside the node took no time.
    """

    what: str
    device: str
    model: str
    published: float
    ours: float
    bound: float
    theirs: float
    free: float

    @property
    def agrees(self) -> bool:
        return abs(self.ours - self.published) <= CLOSE

    @property
    def reason(self) -> str:
        """The ablation that comes nearest to the published gain; empty where ours is close."""
        if self.agrees:
            return ""
        if self.free < self.published - CLOSE:
            return (
                f"without any communication {self.free:.2f}: the rest is not communication, "
                "the baseline was slower elsewhere"
            )
        ablations = {
            f"with FLUX's mean overlap, {_MACHINES[self.device][2]:.0%}": self.theirs,
            "with operators at their bound": self.bound,
            "without any communication": self.free,
        }
        name, gain = min(ablations.items(), key=lambda one: abs(one[1] - self.published))
        return f"{name} {gain:.2f}"


def _cluster(device: str, nodes: int) -> Cluster:
    nics, rate, _ = _MACHINES[device]
    network = Network(f"{nics} x {rate * 8e-9:g} Gb/s", rate, 0.94, 5e-6, "fat_tree", nics=nics)
    return make_cluster(device, network, nodes)


def _scenarios(what: str, device: str) -> Iterator[Scenario]:
    """What may have been the best of a published cell, as far as it fits into memory."""
    for model in ("gpt3-175b", "llama2-70b"):
        if what == "training":
            work = training.by_name(model, tp=8, pp=8, global_batch=256, gradients="bf16")
            yield Scenario("train", work, _cluster(device, 16))
            continue
        sizes = ((8, 2048),) if what == "prefill" else ((64, 512), (512, 512))
        for batch, seq in sizes:
            work = serving.by_name(model, tp=8, phase=what, batch=batch, seq=seq, all_reduce="nccl")
            one = Scenario("serve", work, _cluster(device, 1))
            if memory_of(work, one.cluster).fits(one.cluster.device):
                yield one


def model_table(
    calibration: Calibration | None = None,
    progress: Callable[..., None] = lambda *_: None,
    wanted: Iterable[str] = tuple(PUBLISHED),
) -> list[Row]:
    """A row for each published gain of ``wanted``."""
    chosen = {what: PUBLISHED[what] for what in wanted}
    found, total = [], sum(map(len, chosen.values()))
    for what, cells in chosen.items():
        for device, gain in cells.items():
            progress(f"FLUX: {what} on {device}", len(found), total)
            rows = [_row(what, device, gain, one, calibration) for one in _scenarios(what, device)]
            found.append(max(rows, key=lambda row: row.ours))
    return found


def _row(
    what: str, device: str, gain: float, scenario: Scenario, calibration: Calibration | None
) -> Row:
    result = simulate_all(scenario, calibration)
    base = result.seconds("unfused")
    # the same with links on which communication takes no time
    fast = replace(scenario.cluster.device, link_rate=1e14)
    if fast.bridge_rate:
        fast = replace(fast, bridge_rate=1e14)
    free = replace(scenario, cluster=replace(scenario.cluster, device=fast))
    alone = simulate_all(free, calibration, ("bound",)).seconds("bound")
    hidden = _MACHINES[device][2] * max(base - alone, 0.0)
    return Row(
        what,
        device,
        scenario.workload.model.name,
        gain,
        base / result.seconds("fused"),
        base / result.seconds("bound"),
        base / (base - hidden),
        base / alone,
    )
