"""Random numbers of tests, the same in every run.

Python's ``hash`` is not: it differs by process where a seed contains text.
"""

from __future__ import annotations

from zlib import crc32

import torch


def generator(device: torch.device | str, *seed: object) -> torch.Generator:
    """A generator of ``device`` that draws the same numbers in every process with this seed."""
    return torch.Generator(device).manual_seed(crc32(repr(seed).encode()))
