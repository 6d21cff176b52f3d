"""Options that several commands have, and what they mean."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from tileweave.launcher import DeviceType, default_device_type, default_world_size

World = Annotated[int | None, typer.Option("--world", help="Ranks to start (default: up to 4).")]
Device = Annotated[
    Literal["auto", "cuda", "cpu"],
    typer.Option(help="auto: GPUs if there are two; cpu: interpreted kernels."),
]


def place(device: str, world: int | None) -> tuple[DeviceType, int]:
    """The kind of device to run on, and the number of ranks."""
    kind: DeviceType = (
        default_device_type() if device == "auto" else "cuda" if device == "cuda" else "cpu"
    )
    return kind, default_world_size(kind, world)
