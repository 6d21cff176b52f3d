"""Definition of torch operators, groups by name, workspaces, and the launch of a kernel with its
copies.

Operators are defined with ``torch.library.Library`` rather than ``@custom_op``: dispatch takes half
the time, and 7 us per call matter for decoding.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

from tileweave import errors as tileweave_errors
from tileweave.errors import InputError, TileweaveError, UnsupportedError, peers_know
from tileweave.kernels.runtime.peers import Peers
from tileweave.ops.core.operator import operator, refuse_tangents
from tileweave.planning.machine import CPU, Machine
from tileweave.planning.problem import Plan
from tileweave.transport import torch_collectives as collectives
from tileweave.transport.call_ledger import NBYTES
from tileweave.transport.interface import Copies, Sending, Transport
from tileweave.transport.nodes import agree_on_topology
from tileweave.transport.workspace import CALL, REGISTRY, Instance, Workspace

# A process group, its name, or a DeviceMesh of one dimension.
Group = dist.ProcessGroup | DeviceMesh | str
T = TypeVar("T")
LIBRARY = torch.library.Library("tileweave", "DEF")
_LOG = logging.getLogger("tileweave")
# os.environ.get() takes 1 us: it encodes the name, and catches an exception
_VARIABLES = getattr(os.environ, "_data", os.environ)
_NOT_THE_USER = tuple(
    str(Path(file).parent) + os.sep for file in (torch.__file__, tileweave_errors.__file__)
)
_TRUE = ("1", "true", "yes", "on", "y")  # of TRITON_INTERPRET, as triton reads it
_DEBUG, _INTERPRET = map(
    getattr(os.environ, "encodekey", str), ("TILEWEAVE_DEBUG", "TRITON_INTERPRET")
)
# torch.cuda.current_device() also initialises CUDA
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
MOST_PARTS = 32 << 20  # bytes of parts of tiles: an allocation takes 4 us of 40
_SAID: set[tuple[str, str]] = set()  # (operator, what was logged about its calls)


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any] = lambda *_, **__: None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Define one operator: schema, implementation for CPU and CUDA, fake, gradient.

    ``fake``: of an ``.out`` form that returns nothing, only to check its arguments.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema)
    if "!)" in schema:
        implementation = _counting_versions(schema, implementation)
    given = {key: _as_given(schema, key.lower(), implementation) for key in ("CPU", "CUDA")}
    for key, one in given.items():
        LIBRARY.impl(name, _with_all_results(one) if "-> (Tensor, " in schema else one, key)
    operator(name).define(implementation, given["CPU"], given["CUDA"], backward, setup_context)
    torch.library.register_fake(f"tileweave::{name}", _on_one_device(schema, fake), lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"tileweave::{name}", backward, setup_context=setup_context, lib=LIBRARY
        )


def _with_all_results(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Replace results that are None by empty tensors, since a schema has no optional results."""

    def call(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        found = implementation(*args, **kwargs)
        return tuple(args[0].new_empty(0) if one is None else one for one in found)

    return call


def _counting_versions(schema: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Increment autograd's version counters of arguments that the schema marks (a!).

    Kernels that write to memory do not do so themselves.
    """
    changed = [(at, words[1]) for at, words in enumerate(_arguments(schema)) if "!)" in words[0]]
    returns = not schema.endswith("-> ()")

    def call(*args: Any, **kwargs: Any) -> Any:
        counted = []
        for at, name in changed:
            value = kwargs[name] if name in kwargs else args[at]
            if value is None:
                continue
            for t in value if isinstance(value, (list, tuple)) else (value,):
                if t is not None and not t.is_inference():
                    counted.append(t)
                elif t is not None and not torch.is_inference_mode_enabled():
                    raise InputError(
                        f"asked: {schema.split('(', 1)[0]} into a tensor made under "
                        "inference_mode, outside of it; allowed: under torch.inference_mode(), "
                        "or a tensor made outside; remedy: one of them"
                    )
        result = implementation(*args, **kwargs)
        torch.autograd.graph.increment_version(counted)
        return result if returns else None

    return call


def _arguments(schema: str) -> list[list[str]]:
    """Type and name (and default) of each argument."""
    return [
        words.split()
        for words in schema.split("(", 1)[1].rsplit(") ->", 1)[0].replace("*, ", "").split(", ")
    ]


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _on_one_device(schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse tensors on several devices in a fake.

    torch calls the fake if any tensor is on meta. With others on a device, results would be memory
    that no kernel wrote.
    """
    name, returns = schema.split("(", 1)[0], not schema.endswith("-> ()")

    def call(*args: Any, **kwargs: Any) -> Any:
        devices = {t.device for t in _tensors((*args, *kwargs.values()))}
        if len(devices) > 1:
            raise InputError(
                f"asked: {name} of tensors on {', '.join(sorted(map(str, devices)))}; "
                "allowed: one device; remedy: move them to one, or load what is still on meta"
            )
        result = fake(*args, **kwargs)
        return result if returns else None

    return call


def _as_given(schema: str, kind: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``implementation`` on the device of its tensors and in their dtypes, with autocast or
    without.

    Forward-mode derivatives would be lost, so they are refused. Compiled code enters here first, so
    the group is looked up here. A call that fails here is reported to peers, which wait for it
    (``transport/call_ledger.py``).
    """
    name, arguments = schema.split("(", 1)[0], _arguments(schema)
    tensor_at = next(at for at, (of, *_) in enumerate(arguments) if of == "Tensor")
    group_at = next((at for at, words in enumerate(arguments) if words[1] == "group_name"), None)
    on_gpu, is_any_autocast_enabled = kind == "cuda", torch._C._is_any_autocast_enabled

    def call(*args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            refuse_tangents(name, _tensors((*args, *kwargs.values())))
        if is_any_autocast_enabled() and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return call(*args, **kwargs)
        # -1: a tensor on the CPU, which the checks refuse
        if on_gpu and args[tensor_at].get_device() not in (-1, _current_device()):
            with torch.cuda.device(args[tensor_at].device):
                return call(*args, **kwargs)
        group_name = group_at and args[group_at]
        if not group_name:  # the call has no peers
            return implementation(*args, **kwargs)
        REGISTRY.look_up(group_name, _resolved)
        return reporting(implementation, group_name, args[tensor_at], args, kwargs)

    return call


def reporting(
    call: Callable[..., T],
    group_name: str,
    x: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> T:
    """Make a call over the workspace of x. One that fails here is reported to peers."""
    CALL.posted, done = False, False
    try:
        result = call(*args, **kwargs)
        done = True
    except TileweaveError as error:
        done = peers_know(error, CALL.posted)
        raise
    finally:
        if not done:
            REGISTRY.break_off(group_name, x.device, CALL.posted, sys.exc_info()[1])
    return result


def first_derivative(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``backward``, which refuses to be differentiated: its kernels and collectives have no
    gradient."""

    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            refuse_second_derivative(name)
        return backward(ctx, *grads)

    return call


def refuse_second_derivative(name: str) -> NoReturn:
    """Raise :class:`UnsupportedError` for a second derivative of operator ``name``."""
    raise UnsupportedError(
        f"asked: the gradient of {name} as something to differentiate (create_graph=True); "
        "allowed: first derivatives; remedy: leave create_graph out, or use torch's own operators "
        "for that part"
    )


def name_of(group: Group | None) -> str:
    """The name of ``group``, which operators take in place of a group. None: the default group."""
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise InputError(
                "asked: an operator over the default group; allowed: after torch.distributed is "
                "initialised; remedy: call torch.distributed.init_process_group, or pass group="
            )
    elif isinstance(group, str):
        # modules keep names, and torch may give a name to another group later
        if not torch.compiler.is_compiling():
            REGISTRY.look_up(group, _resolved)
        return group
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InputError(
                f"asked: a DeviceMesh of {group.ndim} dimensions as group; allowed: one "
                "dimension; remedy: pass mesh[dimension], or mesh.get_group(dimension)"
            )
        group = group.get_group()
    elif not isinstance(group, dist.ProcessGroup):
        # new_group returns such to ranks that are no members
        raise InputError(
            f"asked: group {group!r:.99}; allowed: a ProcessGroup that contains this rank, its "
            "name, or a DeviceMesh of one dimension; remedy: call on members only"
        )
    name = group.group_name
    if not torch.compiler.is_compiling():  # compiled code looks the group up in each call
        REGISTRY.belongs(name, group)
    return name


def group_of(name: str) -> dist.ProcessGroup:
    """The group of this name. Raises :class:`InputError` for a group that this rank is not in."""
    known = REGISTRY.known(name)
    if known is not None:
        return known
    group = _resolved(name)
    if dist.get_rank(group) < 0:
        raise InputError(
            f"asked: group {name!r:.100}; allowed: groups that contain this rank; "
            "remedy: call on members only"
        )
    return group


def _resolved(name: str) -> dist.ProcessGroup:
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (LookupError, RuntimeError, ValueError) as error:
        raise InputError(
            f"asked: group {name!r:.100}; allowed: a group of this process that still exists; "
            "remedy: pass a ProcessGroup that this rank is a member of"
        ) from error


def rank_and_size(name: str) -> tuple[int, int]:
    """Rank in the group, and its world size. A constant for torch.compile."""
    group = group_of(name)
    return dist.get_rank(group), dist.get_world_size(group)


# As torch.compiler.assume_constant_result does. That would import the compiler, and with it triton.
rank_and_size._dynamo_marked_constant = True  # type: ignore[attr-defined]


def machine_of(device: torch.device) -> Machine:
    """The properties of ``device`` that plans depend on."""
    if device.type != "cuda":
        return CPU
    from tileweave.transport.cuda import describe

    return describe(device.index)


def l2_bytes(device: torch.device) -> int:
    """The size of the L2 of ``device``; 0 where torch does not say."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)


def _is_set(variable: Any) -> bool:
    """Whether an environment variable, encoded, is set."""
    return variable in _VARIABLES


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter in this process, hence on CPU tensors."""
    if not _is_set(_INTERPRET) or os.environ["TRITON_INTERPRET"].lower() not in _TRUE:
        return False
    if not _triton_interprets():
        raise InputError(
            f"asked: TRITON_INTERPRET={os.environ['TRITON_INTERPRET']} in a process that had "
            "imported triton before; allowed: before triton is imported, which reads it only then; "
            "remedy: set it in the environment of the process, or before the first import of "
            "triton (torch.compile and others import it, too)"
        )
    return True


def _triton_interprets() -> bool:
    """Whether Triton decided for its interpreter when it was imported; True if it was not yet."""
    language = sys.modules.get("triton.language")
    return language is None or type(language.sigmoid).__name__ == "InterpretedFunction"


_triton_interprets._dynamo_marked_constant = True  # type: ignore[attr-defined]


def workspace_of(name: str, device: torch.device) -> Workspace:
    """The workspace of a group and a device; the first call for a pair is collective."""
    known = REGISTRY.find(name, device)
    if known is not None:
        return known

    def make() -> Transport:
        group = group_of(name)
        ranks = agree_on_topology(group)
        if device.type == "cuda":
            from tileweave.transport.cuda import CudaTransport

            return CudaTransport(group, device, ranks)
        from tileweave.transport.cpu import CpuTransport

        return CpuTransport(group, ranks)

    workspace = REGISTRY.get(name, device, make)
    if not workspace.ledger.opened:
        transport = workspace.transport
        pages: dict[int, Any] = {**transport.share(NBYTES)}
        if pages and transport.topology.nodes > 1 and transport.topology.per_node:
            # of ranks that tell their calls: the others of the rail
            far = set(transport.topology.rail(transport.rank)) - set(pages)
            pages |= {rank: bytearray(NBYTES) for rank in far}
        workspace.ledger.open(pages, transport.rank)
        REGISTRY.opened(name, device)
    return workspace


def checksum_of(common: object) -> int:
    """Checksum, never 0, of what ranks must agree on: the same in every process."""
    return zlib.crc32(json.dumps(common, sort_keys=True).encode()) or 1


@lru_cache(maxsize=64)
def number_of(what: object) -> int:
    """Number for a name, a dtype or an option, to hash with sizes: the same in every process."""
    return checksum_of(str(what))


def endpoint(instance: Instance, dtype: torch.dtype) -> Peers:
    """The pointers of ``instance`` for a kernel over ``dtype``; kept, since making views takes
    microseconds."""
    found = instance.cache.get(dtype)
    if found is None:
        found = instance.cache[dtype] = Peers(
            instance.slots.view(dtype),
            instance.slot_bytes // dtype.itemsize,
            instance.slot_table,
            instance.signal_table,
            instance.signals,
            instance.control,
            instance.report,
            instance.counters,
        )
    return found  # type: ignore[return-value]


def parts_of_eager_calls(instance: Instance, elements: int, after: int = 0) -> torch.Tensor | None:
    """Memory where kernels of eager calls add up parts of tiles, which saves an allocation in each;
    None if there are none, or very many. ``after``: bytes of scratch that such a call also uses."""
    begin = -(-after // 512) * 512
    if not 0 < 4 * elements <= MOST_PARTS:
        return None
    with torch.inference_mode(False):
        return instance.scratch(begin + 4 * elements)[begin:].view(torch.float32)


def copy_slot(instance: Instance) -> int:
    """The slot of the next copy-engine call: the parity of its number, and 0 in a captured call.

    A graph keeps the slot that it was captured with.
    """
    return 0 if instance.captured else instance.calls & 1


def push_with_launch(
    instance: Instance,
    launch: Callable[[], None],
    copies: Copies,
    given: int,
    capturing: bool,
    sending: Sending | None = None,
) -> None:
    """Launch a kernel, and push ``copies`` concurrently.

    ``given`` is the address of the tensor that copies read; ``capturing``: into a CUDA graph;
    ``sending``: what is exchanged with other nodes.
    """
    transport, launched = instance.transport, False
    try:
        if sending is None:
            transport.push(copies, given, 0, launch, capturing)
        else:
            transport.push(copies, given, 0, launch, capturing, sending)
        instance.calls += 1
        CALL.posted = False  # the call has been made
        launched = not instance.interpreted
    finally:
        # On a GPU the kernel ends after the copies: it waits for the signal that follows the last
        # of them. To wait for an event as well would cost the host 5 us. A capture must join every
        # stream that it forked.
        if capturing or not launched or sending is not None:
            transport.join()
        instance.launched()


def await_frozen_slot(instance: Instance, peers: Peers) -> None:
    """Wait until peers have read the slot of a captured call, which always uses the same one.

    Needed where copies write to peers as soon as the call is queued.
    """
    if instance.captured:
        from tileweave.kernels.runtime.barrier import barrier

        barrier(peers, instance.transport.world_size, instance.transport.rank)


def log_fallback(op: str, plan: Plan) -> None:
    """Log once per reason that an operator runs unfused."""
    key = (op, plan.reason)
    if plan.path == "unfused" and key not in _SAID:
        _SAID.add(key)
        _LOG.info("%s runs unfused: %s", op, plan.reason)


def contiguous(tensor: torch.Tensor, name: str, op: str) -> torch.Tensor:
    """``tensor``, or a contiguous copy of it. Logs once per operator and argument that calls copy
    it."""
    if tensor.is_contiguous():
        return tensor
    key = (op, name)
    # a compiler makes the copy part of its own kernels
    if not torch.compiler.is_compiling() and key not in _SAID:
        _SAID.add(key)
        _LOG.info("%s copies %s in each call: it is not contiguous", op, name)
    return tensor.contiguous()


def debugging() -> bool:
    """Whether ranks compare all of each call before it, and wait for its end:
    ``TILEWEAVE_DEBUG=1``."""
    if not _is_set(_DEBUG):
        return False
    text = os.environ.get("TILEWEAVE_DEBUG", "0")
    if text not in ("", "0", "1"):
        raise InputError(
            f"asked: TILEWEAVE_DEBUG={text!r}; allowed: 0 or 1; "
            "remedy: set one of them, or unset it"
        )
    return text == "1"


def agree(group: dist.ProcessGroup, signature: dict[str, object]) -> None:
    """Collective: raise the same :class:`RankMismatchError` on every rank if signatures differ.

    A signature has the name of the operator at "op". With ``TILEWEAVE_DEBUG=1`` the lines of the
    program that lead to the call are compared, too, which tells calls of equal shapes apart.
    """
    if debugging():
        signature = {**signature, "where": _call_site()}
    collectives.agree(json.dumps(signature, sort_keys=True), group, str(signature["op"]))


_CALLERS = 3  # lines of a call site


def _call_site() -> list[str]:
    """The innermost lines of the user's program in the stack, "file:line" without folders."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < _CALLERS:
        name = frame.f_code.co_filename
        # neither torch nor this package, nor code that torch.compile made
        if not name.startswith((*_NOT_THE_USER, "<")) and "torchinductor" not in name:
            found.append(f"{os.path.basename(name)}:{frame.f_lineno}")
        frame = frame.f_back
    return found
