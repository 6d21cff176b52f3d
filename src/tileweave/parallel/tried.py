"""What is known of a module around sharded layers, and the errors of its calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tileweave.errors import InputError
from tileweave.parallel.fused import FUSED
from tileweave.parallel.heads import Counts, Form
from tileweave.parallel.hooks import tensors_of


@dataclass
class Tried:
    """A module with sharded layers: a column-parallel and a row-parallel one at least.

    path : of the module.
    columns, rows : paths of its sharded layers, from the module.
    inner : paths of modules in it that are tried themselves, from the module.
    size : the number of ranks.
    form : how it takes the heads of one rank.
    guessed : no call is made before a trial has confirmed the form.
    others : what is tried in place of ``form``, one after the other, if a trial fails.
    done : there is nothing to try any more.
    by_row : its layers gather and scatter rows: its input may have those of one rank.
    between : arguments that are used between its layers, as a trial found: without rows, each rank
        has the gradient of its heads or features only.
    walks : names of modules on the way to each of its sharded layers.
    """

    path: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    inner: tuple[str, ...]
    size: int
    form: Form = field(default_factory=lambda: Form({}))
    guessed: bool = False
    others: tuple[Form, ...] = ()
    done: bool = False
    by_row: bool = False
    between: tuple[int | str, ...] = ()
    walks: tuple[tuple[str, ...], ...] = field(init=False)

    @property
    def attributes(self) -> Counts:
        """All attributes that may become those of one rank."""
        found = dict(self.form.counts)
        for other in self.others:
            found |= other.counts
        return found

    def __post_init__(self) -> None:
        self.walks = tuple(tuple(name.split(".")) for name in (*self.columns, *self.rows))

    def refuse(self, module: nn.Module, reason: str) -> InputError:
        """The error of this module."""
        ends, begins = " and ".join(self.rows) or "comes next", ", ".join(self.columns)
        several = [name for name in self.columns if name.rpartition(".")[2] in FUSED]
        parts = "give the features of each projection of {} (tw.parallel.Colwise(parts=...)), "
        return InputError(
            f"asked: {self.path or type(module).__name__} over {self.size} ranks{self._given()}, "
            f"whose forward {reason}; allowed: a forward that computes what {ends} of a rank takes "
            f"from that rank's part of {begins}: whole heads, or features one by one; remedy: "
            f"{self._rows()}take the numbers of heads and features from shapes, give it those of "
            f"one rank (and pass check=False), {parts.format(several[0]) if several else ''}or "
            "pass a plan without it"
        )

    def untried(self, module: nn.Module, why: str = "") -> InputError:
        """The error of a call that cannot be tried, of a module whose form is guessed."""
        return InputError(
            f"asked: {self.path or type(module).__name__} over {self.size} ranks{self._given()}, "
            f"in a call that cannot be tried{why and f' ({why})'}; allowed: a first call with "
            f"tensors and numbers only; remedy: {self._rows()}call the model once without a cache "
            "(use_cache=False), before torch.compile and CUDA graphs; or set its attributes before "
            "tileweave.parallelize"
        )

    def check_gradients(self, args: Any, kwargs: Any) -> None:
        """Raise :class:`InputError` for a gradient of an argument in ``between``."""
        for name in self.between if torch.is_grad_enabled() and not self.by_row else ():
            given = kwargs.get(name) if isinstance(name, str) else (*args, *[None] * name)[name]
            if any(t.requires_grad for t in tensors_of(given)):
                raise InputError(
                    f"asked: {self.path} with argument {name!r}, which needs a gradient and is "
                    f"used between {', '.join(self.columns)} and {', '.join(self.rows)}; allowed: "
                    "one that needs none, since each rank has that of its heads or features; "
                    "remedy: detach it, or pass a plan without this module"
                )

    def _rows(self) -> str:
        rows = "take the number of rows from what its layers return, or sequence_parallel=False; "
        return rows if self.by_row else ""

    def _given(self) -> str:
        if not (self.guessed and self.form.counts):
            return ""
        counts = self.form.counts.items()
        return " with " + ", ".join(f"{n} = {own} of {of}" for n, (of, own) in counts)
