"""What the two dense all-to-all operators share: their dimensions as arguments, and divisibility."""

from __future__ import annotations

from tileweave.errors import require
from tileweave.schedule_scatter import Exchange


def as_exchange(scatter_dim: int, gather_dim: int) -> Exchange:
    """The two arguments, checked."""
    require(
        scatter_dim in (0, 1) and gather_dim in (0, 1),
        f"scatter_dim={scatter_dim}, gather_dim={gather_dim}",
        "0 (rows) or 1 (columns) each",
        "flatten the other dimensions into rows",
    )
    return Exchange(scatter_dim, gather_dim)


def check_divides(how: Exchange, rows: int, cols: int, size: int, columns_of: str) -> None:
    """What is scattered comes out even; of x of several dimensions rows are dimension 0."""
    what, count = ("rows", rows) if how.scatter_dim == 0 else (f"columns ({columns_of})", cols)
    allowed, remedy = "a multiple of the group's size", "pad them, or scatter the other"
    require(count % size == 0, lambda: f"{count} {what} over {size} ranks", allowed, remedy)
