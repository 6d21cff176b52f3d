"""The description of an operator. All that lists or handles operators is derived from it.

To add an operator, write its reference (``ops/reference.py``), its kernel, and one file with its
public function and an :class:`OperatorSpec`, which :func:`registration.register` takes. From the
description are derived

- for torch: the schemas, the operator, its ``.out`` form, its backward operator, their fakes, and
  None as the gradient of arguments that have none (``ops/core/registration.py``);
- for users: ``tileweave.OPERATORS``, ``tileweave.explain`` and ``tileweave.warmup``;
- for the commands: what ``check``, ``check --stress``, ``demo``, ``doctor``, ``bench`` and
  ``trace`` run, from the samples that it names (``bench/samples``);
- for tests: what must exist (``tests/pure/test_operator_completeness.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tileweave.planning.problem import Plan

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of an operator as Python code, which compilers can trace.

    Parameters
    ----------
    setup_context : callable
        ``setup_context(ctx, inputs, output)`` saves in ``ctx`` what the backward reads.

    gradients : callable
        ``gradients(ctx, *grads)`` returns one gradient per argument of the operator.
    """

    setup_context: Callable[[Any, tuple[Any, ...], Any], None]
    gradients: Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class BackwardOperator:
    """A backward that is a torch operator of its own, ``<name>_backward``, because it communicates.

    Parameters
    ----------
    arguments : str
        Its schema without parentheses and without flags: ``bool need_<name>`` is appended for each
        name in ``of``.

    of : tuple of str
        The arguments of the forward that have a gradient, in the order in which these are returned.

    setup_context : callable
        ``setup_context(ctx, inputs, output)`` saves in ``ctx`` what the backward reads.

    passed : callable
        ``passed(ctx, *grads)`` returns the arguments of a call of the backward operator; None if
        there is nothing to differentiate, on all ranks alike: then no rank calls it.

    run : callable
        ``run(*arguments, *needed)``, the implementation, returns one gradient per name in ``of``;
        None, or an empty tensor, for one that is not needed. Only torch gets an empty tensor.

    like : callable
        ``like(*arguments)`` returns tensors of the shapes and dtypes of the gradients: the fake.

    into : str
        The name in ``of`` whose gradient may be added to a tensor instead, or "". If
        ``setup_context`` sets ``ctx.main_grad`` to one, ``run`` also gets ``main_grad=``, in the
        operator ``<name>_backward.into``, and the argument's gradient is None.
    """

    arguments: str
    of: tuple[str, ...]
    setup_context: Callable[[Any, tuple[Any, ...], Any], None]
    passed: Callable[..., tuple[Any, ...] | None]
    run: Callable[..., tuple[torch.Tensor | None, ...]]
    like: Callable[..., Tensors]
    into: str = ""


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """One public operator.

    Parameters
    ----------
    call : callable
        The public function; its name is the name of the operator. It checks what the torch operator
        does not get, and calls ``operator(name)`` (``ops/core/operator.py``).

    arguments : str
        Arguments of the torch operator: its schema without parentheses. ``Tensor? bias`` is
        optional; ``str group_name`` names the group.

    options : str
        More arguments, which the ``.out`` form does not have.

    results : str
        Return type in the schema: ``Tensor``, or ``(Tensor, Tensor)``.

    out : str
        Arguments of the ``.out`` form that are written to.

    forward : callable
        ``forward(*arguments, *options)`` checks its arguments, plans the call and makes it, fused
        or by ``reference``. A second result that was not asked for may be None.
        ``forward(*arguments, out=...)`` is the ``.out`` form, whose result is not used.

    fake : callable
        Takes the arguments of ``forward``; checks them as far as is possible while tracing, and
        returns tensors without data.

    explain : callable
        Returns the :class:`Plan` of a call. Takes those arguments of ``call`` that it needs, by
        their names. Raises what the call would raise for them. Sends nothing.

    warmup : callable or None
        See :func:`tileweave.warmup`. None: make one call with the given arguments, then
        ``explain``.

    backward : Backward, BackwardOperator or None
        None for an operator without gradients.

    reference : callable
        The unfused operator in plain torch: specification, oracle, baseline.

    kernel : str
        The module of the fused kernel; of several, the one to read first.

    dual : str
        The name of the operator that computes the gradient of the first argument; "" if there is
        none.

    define_more : callable or None
        Defines further torch operators that the public function calls.

    samples : str
        The module that has ``SAMPLES``: how commands make inputs, call the operator and judge the
        result, and with which sizes. Only commands import it. "":
        ``tileweave.bench.samples.<name>``.
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
    warmup: Callable[..., Plan | dict[int, Plan]] | None = None
    backward: Backward | BackwardOperator | None = None
    dual: str = ""
    define_more: Callable[[], None] | None = None
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
