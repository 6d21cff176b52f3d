"""Configs as JSON files keep them. Every field is checked. No torch, no triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING
from dataclasses import fields as fields_of
from typing import Any

from tileweave.errors import InputError, require
from tileweave.files import short
from tileweave.planning.problem import MatmulConfig

_POWERS = (16, 32, 64, 128, 256, 512)
_ALLOWED = {
    "kernel": ("triton", "hopper", "library"),
    "transport": ("copy_engine", "sm"),
    "tile_m": _POWERS,
    "tile_n": _POWERS,
    "tile_k": _POWERS,
    "num_stages": range(1, 17),
    "num_warps": (1, 2, 4, 8, 16),
    "group_m": range(1, 1025),
    "num_slices": (1, 2, 4, 8, 16, 32),
    "num_producers": range(1, 1025),
    "band_sources": range(1, 9),
    "team": range(1, 1025),
    "shots": (1, 2),
}


def read_config(raw: object, where: str) -> MatmulConfig:
    """A config from JSON, every field checked. ``where`` names it in errors.

    Raises
    ------
    InputError
        if anything is not as :class:`MatmulConfig` defines it.
    """
    return MatmulConfig(**checked_fields(raw, MatmulConfig, where, _may_be))


def _may_be(name: str, value: object) -> bool:
    if name in _ALLOWED:
        return type(value) in (int, str) and value in _ALLOWED[name]
    return type(value) is bool


def checked_fields(
    raw: object, kind: type, where: str, may_be: Callable[[str, object], bool]
) -> dict[str, Any]:
    """``raw`` as arguments of the dataclass ``kind``, after a check of the names of all fields, and
    of their values by ``may_be(name, value)``."""
    known = {field.name: field for field in fields_of(kind)}
    needed = {name for name, field in known.items() if field.default is MISSING}
    if not isinstance(raw, dict) or not needed <= set(raw) <= set(known):
        given = sorted(map(str, raw)) if isinstance(raw, dict) else type(raw).__name__
        raise InputError(
            f"asked: {given} in {where}; allowed: {', '.join(known)}; remedy: write the file again"
        )
    for name, value in raw.items():
        require(
            may_be(name, value),
            f"{name} = {short(repr(value), 60)} in {where}",
            f"what {kind.__module__}.{kind.__name__} defines",
            "write the file again",
        )
    return dict(raw)
