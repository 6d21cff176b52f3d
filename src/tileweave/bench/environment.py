"""What a time depends on besides the code: versions, devices, commit."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch
import torch.cuda.nccl

import tileweave as tw
from tileweave.transport.workspace import kernels_allowed

WITHOUT_GPUS = (
    "without GPUs times mean nothing: kernels run interpreted, and rivals over gloo instead of NCCL"
)


def environment() -> dict[str, str | int | None]:
    """Versions, device and commit, as strings for a report."""
    gpus = torch.cuda.device_count()
    return {
        "tileweave": tw.__version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": nccl_version() if gpus else None,
        "device": torch.cuda.get_device_name(0) if gpus else platform.machine(),
        "devices": gpus,
        "kernels": kernels_allowed(),
    }


def version_of(distribution: str) -> str | None:
    """The installed version; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def nccl_version() -> str | None:
    """The version of NCCL that torch was built with."""
    try:
        found = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError):
        return None
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def commit() -> str | None:
    """The commit of this file if it is in a git work tree, with ``+`` if the tree has changes."""
    here = Path(__file__)
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    head = _git(here.parent, "rev-parse", "--short=12", "HEAD")
    return head and head + ("+" if _git(here.parent, "status", "--porcelain") else "")


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
