"""Start the ranks of a command: N processes on this machine, or the ranks that ``torchrun`` made.

``launch(function, *args, world_size=4, device_type="cuda")`` calls ``function(member, *args)`` on
every rank and returns what rank 0 returned. If a rank raises or dies, the others are ended and
:class:`RankFailure` is raised; likewise if the ranks are not done in time. On the CPU the ranks use
Triton's interpreter. ``TRITON_INTERPRET`` is set in their environment before they start, because
kernels read it when they are decorated.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tileweave.errors import InputError, TileweaveError, require
from tileweave.transport.nodes import HOST_ID, host_name
from tileweave.transport.nvshmem import rail_asked
from tileweave.transport.workspace import kernels_allowed, timeout_seconds

DeviceType = Literal["cuda", "cpu"]
MAX_RANKS = 8
MOST_RANKS = 1 << 20  # that torchrun may have started
_GRACE_SECONDS = 5.0
_TEARDOWN_SECONDS = 30.0
_CYCLES_PER_SECOND = 1.5e9  # of torch.cuda._sleep, roughly


class RankFailure(TileweaveError, RuntimeError):
    """A launched rank raised, died, or was not done in time."""


@dataclass(frozen=True)
class Member:
    """The rank on which a launched function runs."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup:
        group = dist.group.WORLD
        assert group is not None, "a member exists only while the group does"
        return group

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for the work queued on this rank's device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def pause(self, seconds: float) -> None:
        """Make this rank late: delay the work queued on its device, or its process on the CPU."""
        if self.on_gpu:
            torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))
        else:
            time.sleep(seconds)

    def barrier(self) -> None:
        """Wait for all ranks and the work queued on their devices."""
        self.synchronize()
        if self.on_gpu:
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()
        self.synchronize()


def default_device_type() -> DeviceType:
    """``"cuda"`` if this machine has two devices or more, else ``"cpu"``."""
    return "cuda" if torch.cuda.device_count() >= 2 else "cpu"


def default_world_size(device_type: DeviceType, wanted: int | None, most: int = 4) -> int:
    """How many ranks to run: as many as ``torchrun`` started, else ``wanted``, else up to ``most``
    as devices allow.

    Raises
    ------
    InputError
        for fewer than two ranks, more than eight, or more than there are GPUs; or if ``wanted`` is
        not the number that torchrun started.
    """
    given = given_world_size()
    if given is not None:
        _require_given(wanted, given)
        wanted = given
    present = min(torch.cuda.device_count() if device_type == "cuda" else MAX_RANKS, MAX_RANKS)
    size = min(most, present) if wanted is None else wanted
    if not 2 <= size <= present:
        allowed = (
            f"2 to {present} ranks here"
            if present >= 2
            else "two GPUs or more, and there are fewer"
        )
        remedy = (
            "ask for another number of ranks"
            if given is None
            else "have torchrun start another number of ranks"
        )
        asked = (
            f"a world on {device_type}" if wanted is None else f"world size {size} on {device_type}"
        )
        raise InputError(
            f"asked: {asked}; allowed: {allowed}; remedy: {remedy}"
            + (", or ask for the CPU" if device_type == "cuda" else "")
        )
    return size


def _require_given(wanted: int | None, given: int) -> None:
    """Refuse another world size than that of torchrun, under which no process is started here."""
    require(
        wanted in (None, given),
        f"{wanted} ranks under torchrun",
        f"{given}, its WORLD_SIZE",
        "give no number, or change that of torchrun",
    )


def end_with(main: Callable[[], int | None]) -> NoReturn:
    """Exit with what ``main`` returns; print an error of ours as one line on stderr and exit with
    1."""
    try:
        sys.exit(main())
    except TileweaveError as error:
        sys.exit(f"error: {error}")


def under_torchrun() -> bool:
    """Whether this process is a rank that ``torchrun`` started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def given_world_size() -> int | None:
    """How many ranks ``torchrun`` has started; None without torchrun."""
    return _variable("WORLD_SIZE", 1, MOST_RANKS) if under_torchrun() else None


def is_main_process() -> bool:
    """Whether this process prints: False on all ranks of torchrun but rank 0."""
    return not under_torchrun() or _rank_given() == 0


def _rank_given() -> int:
    return _variable("RANK", 0, _variable("WORLD_SIZE", 1, MOST_RANKS) - 1)


def _variable(name: str, least: int, most: int) -> int:
    """The number in a variable of torchrun."""
    text = os.environ.get(name, "")
    good = text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most
    require(
        good,
        f"{name}={text!r:.60}" if text else f"a rank of torchrun without {name}",
        f"a number from {least} to {most}",
        "start with torchrun, which sets it; or unset RANK and WORLD_SIZE to start ranks here",
    )
    return int(text)


def launch(
    function: Callable[..., Any],
    *args: object,
    world_size: int,
    device_type: DeviceType,
    seconds: float = 1800.0,
    extra: Mapping[str, str] | None = None,
    grace: float = _GRACE_SECONDS,
    nodes: int = 1,
) -> Any:
    """Run ``function(member, *args)`` on new ranks; returns what rank 0 returned.

    Under ``torchrun`` no process is started: this process is a rank, and all but rank 0 get None.

    Parameters
    ----------
    function : callable
        defined at the top level of a module, because ranks import it by name. Its result must be
        picklable.

    world_size : int
        number of ranks.

    device_type : str
        ``"cuda"`` or ``"cpu"``.

    seconds : float
        time limit. After it every rank that is not done prints its stacks and is killed.

    extra : mapping, optional
        environment variables of the ranks.

    grace : float
        seconds that the other ranks may go on after one has raised or died.

    nodes : int
        emulate this many nodes: equal parts of the ranks, in order, of which each shares memory
        only inside. NCCL then takes sockets between them. Without effect under ``torchrun``, where
        the hosts are the nodes.

    Raises
    ------
    RankFailure
        if a rank raises, dies, or is not done in time.
    """
    # these raise once here, and not on every rank, if a variable is invalid
    timeout_seconds()
    kernels_allowed()
    rail_asked()
    require(
        1 <= nodes <= world_size and world_size % nodes == 0,
        f"{world_size} ranks on {nodes} nodes",
        "nodes of equally many ranks",
        "pass another world_size, or another number of nodes",
    )
    given = given_world_size()
    if given is not None:
        _require_given(world_size, given)
        return _run_in_given_world(function, args, device_type)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="tileweave-") as folder:
        result = Path(folder) / "result.pickle"
        with (
            changed_environment(_rank_environment(device_type) | dict(extra or {})),
            _interrupts_ignored(),
        ):
            context: Any = mp.start_processes(
                _rank_main,
                (
                    world_size,
                    nodes,
                    device_type,
                    store.port,
                    dict(os.environ),
                    str(result),
                    function,
                    args,
                ),
                nprocs=world_size,
                join=False,
                start_method=_start_method(),
            )
        try:
            _await(context, result, seconds, grace)
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return pickle.loads(result.read_bytes())


def _await(context: Any, result: Path, seconds: float, grace: float) -> None:
    """Wait until all ranks have ended, or the result is there and they take too long to end."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if context.join(timeout=0.2, grace_period=grace):
                break
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            if result.exists():  # every rank was done, and failed only while it ended
                return
            raise RankFailure(str(error).strip()) from None
        if result.exists():
            deadline = min(deadline, time.monotonic() + _TEARDOWN_SECONDS)
        if time.monotonic() > deadline:
            if result.exists():
                return
            raise RankFailure(_stuck(context, seconds))
    if not result.exists():
        raise RankFailure("the ranks ended without a result")


def _stuck(context: Any, seconds: float) -> str:
    """Make the ranks that are not done print their stacks to stderr; returns the error text."""
    late = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
    if hasattr(signal, "SIGUSR1"):
        for rank in late:
            os.kill(context.processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.3)  # one after the other, so that stacks do not mix
    return (
        f"ranks {late} were not done after {seconds:g} s and were killed; "
        "their stacks are on stderr"
    )


def _rank_environment(device_type: DeviceType) -> dict[str, str | None]:
    """Changes to the environment of a rank; None removes a variable."""
    if device_type == "cuda":
        return {"TRITON_INTERPRET": None}
    wanted: dict[str, str | None] = {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # otherwise gloo resolves the name of the host
    return wanted


def _start_method() -> str:
    """How ranks are started in the environment that they get.

    Importing torch takes seconds of CPU time on each rank. Those that interpret kernels are forked
    from one process that has imported it; it is started once and ends with this one. Its kernels
    are interpreted, and it never touches a device.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or sys.platform != "linux":
        return "spawn"
    mp.set_forkserver_preload(["tileweave.kernels.all_gather.triton", "tileweave.launcher"])
    return "forkserver"


@contextmanager
def changed_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Change the environment of this process, for processes started inside."""
    before = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(before)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C until :func:`_rank_main`, so that their parent ends
    them without a traceback."""
    if threading.current_thread() is not threading.main_thread():  # only that one sets handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _apply(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _rank_main(
    rank: int,
    world_size: int,
    nodes: int,
    device_type: DeviceType,
    port: int,
    environment: dict[str, str],
    result: str,
    function: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    """The main function of a started rank: join the group, call ``function``, write the result on
    rank 0."""
    # Ctrl-C, or the death of the parent, ends a rank at once and silently
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = mp.parent_process()
    if parent is None or not parent.is_alive():  # it died while signals were ignored
        return
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    _apply(dict.fromkeys(os.environ.keys() - environment.keys()) | environment)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    if nodes > 1:
        os.environ[HOST_ID] = f"{host_name()} node {rank * nodes // world_size}"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    member = _join(device_type, rank, world_size, rank, store)
    value = function(member, *args)
    member.barrier()  # no rank has failed: what happens after this cannot invalidate the result
    if rank == 0:
        draft = Path(result).with_suffix(".draft")
        draft.write_bytes(pickle.dumps(value))
        draft.rename(result)
    sys.stdout.flush()
    dist.destroy_process_group()


def _end_with_parent(parent: Any) -> None:
    """The kernel tells a rank that its parent has died only where that started the process."""
    parent.join()
    os.kill(os.getpid(), signal.SIGINT)


def _join(
    device_type: DeviceType, rank: int, world_size: int, index: int, store: dist.Store | None
) -> Member:
    """Initialize the default group on device ``index``; ``store`` None: from the environment."""
    if device_type == "cuda":
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl", rank=rank, world_size=world_size, device_id=device, store=store
        )
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    return Member(rank, world_size, device)


def _run_in_given_world(
    function: Callable[..., Any], args: tuple[object, ...], device_type: DeviceType
) -> Any:
    """Run ``function`` under torchrun, where this process is a rank already."""
    if device_type == "cpu":
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise InputError(
                "asked: interpreted kernels in a process that has imported triton; "
                "allowed: before triton is imported; "
                "remedy: set TRITON_INTERPRET=1 in the environment of torchrun"
            )
        os.environ["TRITON_INTERPRET"] = "1"
    rank, world_size = _rank_given(), _variable("WORLD_SIZE", 1, MOST_RANKS)
    index = _variable("LOCAL_RANK", 0, rank) if "LOCAL_RANK" in os.environ else rank
    _variable("MASTER_PORT", 1, 65535)
    require(
        bool(os.environ.get("MASTER_ADDR")),
        "a rank of torchrun without MASTER_ADDR",
        "the address of rank 0",
        "start with torchrun, which sets it; or unset RANK and WORLD_SIZE to start ranks here",
    )
    member = _join(device_type, rank, world_size, index, None)
    value = function(member, *args)
    member.barrier()
    dist.destroy_process_group()
    return value if rank == 0 else None
