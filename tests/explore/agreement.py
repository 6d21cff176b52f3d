"""Run in a worker of exploration: do numpy blocks and Triton's own tensors say the same?"""

from __future__ import annotations


def triton_and_blocks_agree() -> list[str]:
    """In a worker: the same seeds with Triton's own tensors take the same steps to the same end."""
    from tileweave.explore.interpreter import exploring
    from tileweave.explore.search import SCENARIOS, Seed, run

    seeds = [Seed(f"{s.op}/{s.name}", 2, strategy, 3) for s in SCENARIOS for strategy in ("walk", "pct")]
    ends = []
    for blocks in (True, False):
        with exploring(blocks) as enter:
            ends.append([run(seed, enter) for seed in seeds])
    return [
        f"{fast.seed}: {fast.steps} steps, {fast.failure}; Triton's tensors: {slow.steps} steps, {slow.failure}"
        for fast, slow in zip(*ends, strict=True)
        if (fast.steps, fast.schedule) != (slow.steps, slow.schedule) or fast.failure or slow.failure
    ]
