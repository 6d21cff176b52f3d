"""Exploration needs greenlet, and Triton's interpreter, which needs numpy."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = (
    [] if all(map(find_spec, ("triton", "numpy", "greenlet", "rich"))) else ["test_*.py"]
)
