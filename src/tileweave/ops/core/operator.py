"""Calls of operators from Python, around torch's dispatcher where it would only pass a call on.

The dispatcher takes 20 us of host time per call, with gradients 60 us: as much as the launches of a
call. It is needed where something listens to operators: compilers and tracers, modes, transforms,
profilers, and subclasses of tensors. Everything else calls the implementation that the dispatcher
would call, and records the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from tileweave.errors import UnsupportedError
from tileweave.ops.core.recorded import recorded, recorded_with_lists

TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_CONSTANTS = frozenset((bool, int, float, str, type(None), torch.dtype))
_STRIDED = torch.strided
_AUTOGRAD = torch._C.DispatchKey.AutogradOther  # excluded with all of autograd

_has_function_mode = torch._C._is_torch_function_mode_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_transform = torch._C._are_functorch_transforms_active
_traces = torch._C._get_tracing_state
_profiles = torch.autograd._profiler_enabled
_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


class Operator:
    """One operator of ``torch.ops.tileweave``, or its ``.out`` form. Call it as that one, with all
    arguments, by position."""

    def __init__(self, name: str) -> None:
        self.name, _, overload = name.partition(".")
        self.overload = overload or "default"
        self._implementation: dict[bool, Callable[..., Any]] = {}  # by whether tensors are on a GPU
        self._recorded: dict[bool, Callable[..., Any]] = {}  # by whether arguments are lists
        self.within: Callable[..., Any] = self  # see define

    def define(
        self,
        within: Callable[..., Any],
        on_cpu: Callable[..., Any],
        on_gpu: Callable[..., Any],
        backward: Callable[..., Any] | None,
        setup_context: Callable[..., None] | None,
    ) -> None:
        """Set what torch's dispatcher calls, and the gradient. ``within``: what other operators
        call inside theirs, which have plain tensors on the current device, a group that exists, and
        no autocast; an error there is one of theirs."""
        self.within = within
        self._implementation = implementation = {False: on_cpu, True: on_gpu}
        self._recorded = {}
        if backward is None or setup_context is None:
            return

        def forward(ctx: Any, *args: Any) -> Any:
            result = implementation[args[0].is_cuda](*args)
            setup_context(ctx, args, result)
            return result

        self._recorded = {
            False: recorded(self.name, forward, backward),
            True: recorded_with_lists(self.name, implementation, backward, setup_context),
        }

    def __call__(self, *args: Any, **results: Any) -> Any:
        if not torch.compiler.is_compiling():
            call = self._around_torch((*args, *results.values()) if results else args)
            if call is not None:
                return call(*args, **results)
            if _has_transform():  # the implementation gets tensors without their tangents
                values = _with_elements((*args, *results.values()))
                refuse_tangents(self.name, values)
                if self._recorded:
                    refuse_transformed(self.name, values)
        return getattr(getattr(torch.ops.tileweave, self.name), self.overload)(*args, **results)

    def _around_torch(
        self, values: Iterable[Any], lists: bool = False
    ) -> Callable[..., Any] | None:
        """What torch's dispatcher would call; None where it would do more than that. ``lists``:
        the values are elements of lists, too."""
        on_gpu, records = None, False
        for value in values:
            kind = type(value)
            if kind in _CONSTANTS:
                continue
            if kind not in TENSORS:
                if kind is not list or lists:
                    return None
                return self._around_torch(_with_elements(values), True)
            here = value.is_cuda
            if on_gpu is None:
                on_gpu = here
            plain = value.layout is _STRIDED and (here or value.is_cpu)
            if here is not on_gpu or not plain or value.is_neg():
                return None
            records = records or value.requires_grad
        if on_gpu is None or _listens():
            return None
        if records and torch.is_grad_enabled():
            # below autograd nothing is recorded
            return None if _excluded(_AUTOGRAD) else self._recorded.get(lists)
        return self._implementation.get(on_gpu)


def _listens() -> bool:
    """Whether a mode, a transform, a profiler or a tracer wants to see operators."""
    return bool(
        _has_function_mode()
        or _dispatch_modes()
        or _has_transform()
        or _profiles()
        or _traces() is not None
    )


def plain_on_gpu(*tensors: torch.Tensor | None) -> bool | None:
    """Whether tensors are on a GPU, or on the CPU. None where torch's dispatcher would do more than
    to call the implementation for that, which includes to record a gradient. The first is given."""
    on_gpu, records = None, torch.is_grad_enabled()
    for t in tensors:
        if t is None:
            continue
        if type(t) not in TENSORS or (records and t.requires_grad):
            return None
        here = t.is_cuda
        if on_gpu is None:
            on_gpu = here
        plain = t.layout is _STRIDED and (here or t.is_cpu)
        if here is not on_gpu or not plain or t.is_neg():
            return None
    return None if _listens() else on_gpu


def refuse_tangents(name: str, values: Iterable[Any]) -> None:
    """Raise :class:`UnsupportedError` where one of the values has a forward-mode derivative, which
    would be lost."""
    if forward_ad._current_level >= 0 and any(
        isinstance(value, torch.Tensor) and _has_tangent(value) for value in values
    ):
        raise UnsupportedError(
            f"asked: a forward-mode derivative of {name}; allowed: reverse mode (backward, "
            "torch.autograd.grad); remedy: call on tensors without tangents"
        )


def refuse_transformed(name: str, values: Iterable[Any]) -> None:
    """Raise :class:`UnsupportedError` where a transform of ``torch.func`` would differentiate one
    of the values: the gradients of operators are not made for that."""
    if _has_transform() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in values
    ):
        raise UnsupportedError(
            f"asked: the gradient of {name} in a transform of torch.func (grad, vjp, jacrev, "
            "vmap); allowed: backward and torch.autograd.grad, and vmap of tensors without "
            "gradients; remedy: one of them, or requires_grad_(False) for parameters under vmap"
        )


def _has_tangent(t: torch.Tensor) -> bool:
    with forward_ad._set_fwd_grad_enabled(True):  # torch disables it in a backward
        return forward_ad.unpack_dual(t).tangent is not None


def _with_elements(values: Iterable[Any]) -> list[Any]:
    """These values; of lists the elements."""
    return [each for value in values for each in (value if type(value) is list else (value,))]


_OPERATORS: dict[str, Operator] = {}


def operator(name: str) -> Operator:
    """The operator ``torch.ops.tileweave.<name>``; ``<name>.out`` is a form of its own."""
    # not functools.cache, about which torch.compile warns
    return _OPERATORS.get(name) or _OPERATORS.setdefault(name, Operator(name))
