"""Calls of an operator that autograd records, without torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Implementation = Callable[..., Any]


def recorded(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """A call of ``forward(ctx, *args)``, with the gradient ``backward(ctx, *grads)``."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    kind = type(name, (torch.autograd.Function,), methods)
    base: Any = super(torch.autograd.Function, kind)
    # apply() of Function itself looks for transforms, as Operator does, and for a setup_context()
    # of its own
    return base.apply


def recorded_with_lists(
    name: str,
    implementation: dict[bool, Implementation],
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
) -> Callable[..., Any]:
    """A call of ``implementation``, by whether tensors are on a GPU, of which some arguments and
    results are lists of tensors. autograd.Function does not look into lists: it gets their
    elements.

    ``backward`` and ``setup_context`` are those that torch.library takes, which nests flags and
    gradients as arguments are.
    """

    def forward(ctx: Any, call: _Call, *values: Any) -> tuple[Any, ...]:
        args = call.arguments.nest(values)
        on_gpu = next(v.is_cuda for v in values if isinstance(v, torch.Tensor))
        result = implementation[on_gpu](*args)
        setup_context(ctx, args, result)
        call.several = type(result) is tuple
        results = result if call.several else (result,)
        call.results = Nesting(results)
        ctx.call = call
        return call.results.flat(results)

    def gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        call: _Call = ctx.call
        needs = call.arguments.nest(ctx.needs_input_grad[1:])
        found = backward(_Context(ctx, needs), *call.results.nest(grads))
        return (None, *call.arguments.flat(found))

    apply = recorded(name, forward, gradients)

    def run(*args: Any) -> Any:
        call = _Call(args)
        found = apply(call, *call.arguments.flat(args))
        results = call.results.nest(found)
        return results if call.several else results[0]

    return run


class Nesting:
    """Which of some values are lists of tensors, and of how many. Has none of the values itself."""

    __slots__ = ("_sizes",)

    def __init__(self, nested: Sequence[Any]) -> None:
        self._sizes = [len(each) if _is_of_tensors(each) else None for each in nested]

    def flat(self, nested: Sequence[Any]) -> tuple[Any, ...]:
        """The elements of values like these. None in place of a list is one for each element."""
        found: list[Any] = []
        for size, each in zip(self._sizes, nested, strict=True):
            if size is None:
                found.append(each)
            else:
                found.extend([None] * size if each is None else each)
        return tuple(found)

    def nest(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The values with these elements."""
        left = iter(values)
        return tuple(
            next(left) if size is None else [next(left) for _ in range(size)]
            for size in self._sizes
        )


def _is_of_tensors(value: Any) -> bool:
    """Whether ``value`` is a list of tensors or None; also an empty list."""
    return type(value) is list and all(t is None or isinstance(t, torch.Tensor) for t in value)


class _Call:
    """The nesting of arguments, and of results once there are some."""

    __slots__ = ("arguments", "results", "several")

    def __init__(self, args: Sequence[Any]) -> None:
        self.arguments, self.results, self.several = Nesting(args), Nesting(()), True


class _Context:
    """The context of a gradient, with flags that are nested as arguments are."""

    def __init__(self, ctx: Any, needs: tuple[Any, ...]) -> None:
        self._ctx, self.needs_input_grad = ctx, needs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)
