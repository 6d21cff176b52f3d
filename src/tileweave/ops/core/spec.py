"""The description of an operator. Everything that lists or handles operators is derived from it.

To add an operator, write its reference (``ops/reference.py``), its kernel, and one file with its
public function and an :class:`OperatorSpec`, which :func:`registration.register` takes. From the
description are derived

- with torch: the schemas, the operator, its ``.out`` form, its backward operator, their fakes, and
  the gradients of arguments that have none (``ops/core/registration.py``);
- for users: ``tileweave.OPERATORS``, ``tileweave.explain`` and ``tileweave.warmup``;
- for the commands: what ``check``, ``check --stress``, ``demo``, ``doctor``, ``bench`` and
  ``trace`` run, by way of the samples that it names (``bench/samples``);
- for tests: what has to exist (``tests/pure/test_operator_completeness.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tileweave.planning.problem import Plan

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of an operator as autograd calls it, in Python that compilers see through.

    Parameters
    ----------
    setup_context : ``setup_context(ctx, inputs, output)`` keeps in ``ctx`` what backward reads.
    gradients : ``gradients(ctx, *grads)``, one for each argument of the operator.
    """

    setup_context: Callable[[Any, tuple[Any, ...], Any], None]
    gradients: Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class BackwardOperator:
    """A backward that is a torch operator of its own, ``<name>_backward``, since it communicates.

    Parameters
    ----------
    arguments : its schema without parentheses, up to the flags: one ``bool need_<name>`` follows
        for each of ``of``.
    of : the arguments of the forward that have a gradient, in the order in which they are returned.
    setup_context : ``setup_context(ctx, inputs, output)`` keeps in ``ctx`` what backward reads.
    passed : ``passed(ctx, *grads)``, the arguments of a call; None if there is nothing to
        differentiate, and then no rank calls it.
    run : ``run(*arguments, *needed)``, the implementation: a gradient for each of ``of``, and an
        empty tensor for one that is not needed.
    like : ``like(*arguments)``, tensors that are as the gradients will be: the fake.
    """

    arguments: str
    of: tuple[str, ...]
    setup_context: Callable[[Any, tuple[Any, ...], Any], None]
    passed: Callable[..., tuple[Any, ...] | None]
    run: Callable[..., Tensors]
    like: Callable[..., Tensors]


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """One public operator.

    Parameters
    ----------
    call : the public function; its name is that of the operator. It checks what the torch operator
        does not get to see, and calls ``torch.ops.tileweave.<name>``.
    arguments : of the torch operator: its schema without parentheses. ``Tensor? bias`` is optional;
        ``str group_name`` names the group.
    options : more arguments, which the ``.out`` form does not have.
    results : what it returns, as the schema says it: ``Tensor``, or ``(Tensor, Tensor)``.
    out : what the ``.out`` form writes to.
    forward : ``forward(*arguments, *options)`` checks its arguments, plans the call and makes it, on
        the fused path or by ``reference``; ``forward(*arguments, out=...)`` is the ``.out`` form,
        whose result nothing reads.
    fake : called like ``forward``; checks the arguments as far as tracing can, and returns tensors
        without data.
    explain : the :class:`Plan` of a call, by ``call``'s names of what it needs; raises for what the
        call refuses. Sends nothing.
    warmup : see :func:`tileweave.warmup`; None: one call of the arguments given, then ``explain``.
    backward : None for an operator without gradients.
    reference : the unfused operator in plain torch: specification, oracle, baseline.
    kernel : the module of the fused kernel; of several, the one to read first.
    dual : the name of the operator that computes the gradient of the first argument; "" if there
        is none.
    traced : what ``tileweave trace`` sees inside: "stamps" that the kernel writes; "waits", of a
        kernel without stamps, where it is interpreted; "" for nothing.
    samples : the module that has its ``SAMPLES``: how commands draw, call and judge it, and sizes.
        Only commands import it. "": ``tileweave.bench.samples.<name>``.
    """

    call: Callable[..., Any]
    arguments: str
    forward: Callable[..., Any]
    fake: Callable[..., Any]
    explain: Callable[..., Plan]
    reference: Callable[..., Any]
    kernel: str
    options: str = ""
    results: str = "Tensor"
    out: str = "Tensor(a!) out"
    warmup: Callable[..., Plan] | None = None
    backward: Backward | BackwardOperator | None = None
    dual: str = ""
    traced: Literal["stamps", "waits", ""] = ""
    samples: str = ""

    @property
    def name(self) -> str:
        """The name of the operator, also in ``torch.ops.tileweave``."""
        return self.call.__name__

    @property
    def parameters(self) -> list[str]:
        """Names of all arguments of the torch operator, in order."""
        both = f"{self.arguments}, {self.options}" if self.options else self.arguments
        return [argument.split("=")[0].split()[-1] for argument in both.split(", ")]
