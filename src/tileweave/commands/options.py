"""Options that several commands have, and what they mean."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import typer

from tileweave.errors import require
from tileweave.launcher import DeviceType, default_device_type, default_world_size

World = Annotated[int | None, typer.Option("--world", help="Ranks to start (default: up to 4).")]
Device = Annotated[
    Literal["auto", "cuda", "cpu"],
    typer.Option(help="auto: GPUs if there are two; cpu: interpreted kernels."),
]

# The environment of ranks that record a call: their kernels write what programs do.
STAMPS = {"TILEWEAVE_STAMPS": "1"}
MOST_SEED = 2**63 - 1  # of torch
MOST_SIZE = 2**31 - 1  # of a problem
MOST_DRAWN = 100_000  # random cases, which are all drawn before the first runs


def finite(value: float | None) -> float | None:
    """For the callback of a number that may be a fraction: in some versions of typer NaN passes a
    limit, and no time is up after infinity."""
    require(
        value is None or math.isfinite(value),
        f"{value} for an option that is a number",
        "finite numbers",
        "pass one, or leave the option out",
    )
    return value


def place(device: str, world: int | None) -> tuple[DeviceType, int]:
    """The kind of device to run on, and the number of ranks."""
    kind: DeviceType = (
        default_device_type() if device == "auto" else "cuda" if device == "cuda" else "cpu"
    )
    return kind, default_world_size(kind, world)
