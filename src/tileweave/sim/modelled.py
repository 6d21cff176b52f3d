"""What the simulator knows about each operator that it models, by name. Plain data.

``predict.py`` has the time of each: a function that says which operators it is for. The simulator
may not import the operators (it is a lower layer), so this repeats a part of their descriptions; a
test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Modelled:
    """One operator. ``collective``: what its unfused path communicates by; ``matmul``: it is one
    matmul of three sizes (M, N, K); ``scenarios``: kinds of scenario whose steps call it."""

    name: str
    collective: str
    matmul: bool = True
    scenarios: tuple[str, ...] = ()


_MODELLED = (
    Modelled("all_gather_matmul", "all_gather", scenarios=("train", "serve")),
    Modelled("matmul_reduce_scatter", "reduce_scatter", scenarios=("train", "serve")),
    Modelled("matmul_all_reduce", "all_reduce", scenarios=("serve",)),
    Modelled("matmul_all_to_all", "all_to_all"),
    Modelled("all_to_all_matmul", "all_to_all"),
    Modelled("dispatch_grouped_matmul", "all_to_all", matmul=False, scenarios=("moe",)),
    Modelled("grouped_matmul_combine", "all_to_all", matmul=False, scenarios=("moe",)),
    Modelled("embedding_bag_all_to_all", "all_to_all", matmul=False, scenarios=("dlrm",)),
)
MODELLED = {op.name: op for op in _MODELLED}


def is_matmul(op: str) -> bool:
    """Whether ``op`` is an operator that is one matmul of three sizes."""
    return op in MODELLED and MODELLED[op].matmul


def operators_of(scenario: str) -> tuple[str, ...]:
    """The operators that the steps of this kind of scenario call."""
    return tuple(op.name for op in MODELLED.values() if scenario in op.scenarios)
