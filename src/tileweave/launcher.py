"""Worlds for the commands: N ranks on this machine, one process each, or the world that
``torchrun`` made.

``launch(function, *args, world_size=4, device_type="cuda")`` calls ``function(member, *args)`` on
every rank and returns what rank 0 returned. A rank that raises or dies ends the others and becomes
a :class:`RankFailure` here; so does a world that is not done in time. On the CPU the ranks run
Triton's interpreter: ``TRITON_INTERPRET`` stands in their environment before they start, since
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
from tileweave.transport.workspace import timeout_seconds

DeviceType = Literal["cuda", "cpu"]
MAX_RANKS = 8
_GRACE_SECONDS = 5.0
_TEARDOWN_SECONDS = 30.0
_CYCLES_A_SECOND = 1.5e9  # roughly: what torch.cuda._sleep counts


class RankFailure(TileweaveError, RuntimeError):
    """A rank of a launched world raised, died, or was not done in time."""


@dataclass(frozen=True)
class Member:
    """What a launched function knows of its world."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup:
        group = dist.group.WORLD
        assert group is not None, "a member exists inside a world only"
        return group

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for what is queued on this rank's device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def pause(self, seconds: float) -> None:
        """Come late: hold up what is queued on this rank's device, or its process where there is
        none."""
        if self.on_gpu:
            torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))
        else:
            time.sleep(seconds)

    def barrier(self) -> None:
        """All ranks, and all that is queued on their devices."""
        self.synchronize()
        if self.on_gpu:
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()
        self.synchronize()


def default_device_type() -> DeviceType:
    """``"cuda"`` where this machine has two devices or more, else ``"cpu"``."""
    return "cuda" if torch.cuda.device_count() >= 2 else "cpu"


def default_world_size(device_type: DeviceType, wanted: int | None, most: int = 4) -> int:
    """How many ranks to run with: those that ``torchrun`` started, else ``wanted``, or ``most`` as
    far as there are devices.

    Raises
    ------
    InputError for fewer than two ranks, or more than there are GPUs, or more than eight; for other
    ranks than torchrun started.
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
    """Refuse a world of another size than the one that torchrun has started: no process is started
    here."""
    allowed = f"{given}, its WORLD_SIZE"
    require(
        wanted in (None, given),
        f"{wanted} ranks under torchrun",
        allowed,
        "name no number, or change torchrun's",
    )


def end_with(main: Callable[[], int | None]) -> NoReturn:
    """End this process with what a command returns; with an error of ours as one line on stderr,
    and 1."""
    try:
        sys.exit(main())
    except TileweaveError as error:
        sys.exit(f"error: {error}")


def under_torchrun() -> bool:
    """Whether this process is a rank of a world that somebody else started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def given_world_size() -> int | None:
    """How many ranks ``torchrun`` has started; None where it has not."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else None


def is_main_process() -> bool:
    """Whether this process speaks for its world: every one but torchrun's other ranks."""
    return not under_torchrun() or int(os.environ["RANK"]) == 0


def launch(
    function: Callable[..., Any],
    *args: object,
    world_size: int,
    device_type: DeviceType,
    seconds: float = 1800.0,
    extra: Mapping[str, str] | None = None,
) -> Any:
    """Run ``function(member, *args)`` on every rank of a new world; returns what rank 0 returned.

    Parameters
    ----------
    function : at the top level of a module (ranks find it by name); its result must be picklable.
    seconds : how long the world may last; then every rank prints its stacks and is killed.
    extra : environment variables of the ranks.

    Under ``torchrun`` no process is started: this process is a rank, and all but rank 0 get None.
    """
    timeout_seconds()  # what ranks could not read is told once, here
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
                (world_size, device_type, store.port, os.getpid(), str(result), function, args),
                nprocs=world_size,
                join=False,
                start_method="spawn",
            )
        try:
            _await(context, result, seconds)
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return pickle.loads(result.read_bytes())


def _await(context: Any, result: Path, seconds: float) -> None:
    """Until all ranks have ended, or the result is there and they take too long to go."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if context.join(timeout=0.2, grace_period=_GRACE_SECONDS):
                break
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            if result.exists():  # every rank was done: only its going home went wrong
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
    """Have the ranks that are still at work write down where, to stderr; then say who they are."""
    late = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
    if hasattr(signal, "SIGUSR1"):
        for rank in late:
            os.kill(context.processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.3)  # one after the other, so that stacks do not mix
    return f"ranks {late} were not done after {seconds:g} s and were killed; their stacks are on stderr"


def _rank_environment(device_type: DeviceType) -> dict[str, str | None]:
    """What a rank needs in its environment; None removes a variable."""
    if device_type == "cuda":
        return {"TRITON_INTERPRET": None}
    wanted: dict[str, str | None] = {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo asks the resolver for the host's own name
    return wanted


@contextmanager
def changed_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """This process's environment with changes, for processes started inside."""
    before = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(before)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C until :func:`_rank_main`: their parent ends them,
    without a traceback."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
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
    device_type: DeviceType,
    port: int,
    parent: int,
    result: str,
    function: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    """A started rank: join the world, do the work, leave a result if rank 0."""
    # Ctrl-C, or the parent's death, ends a rank at once and silently
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.getppid() != parent:  # it died while signals were ignored
        return
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    member = _join(device_type, rank, world_size, rank, store)
    value = function(member, *args)
    member.barrier()  # nobody failed: what happens from here on cannot spoil the result
    if rank == 0:
        draft = Path(result).with_suffix(".draft")
        draft.write_bytes(pickle.dumps(value))
        draft.rename(result)
    sys.stdout.flush()
    dist.destroy_process_group()


def _join(
    device_type: DeviceType, rank: int, world_size: int, index: int, store: dist.Store | None
) -> Member:
    """Initialise the default group (``store`` None: from the environment) on device ``index``."""
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
    """This process is a rank already: join by the environment, run, leave."""
    if device_type == "cpu":
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise InputError(
                "asked: interpreted kernels in a process that has imported triton; allowed: before that; "
                "remedy: set TRITON_INTERPRET=1 in the environment of torchrun"
            )
        os.environ["TRITON_INTERPRET"] = "1"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    member = _join(device_type, rank, world_size, int(os.environ.get("LOCAL_RANK", rank)), None)
    value = function(member, *args)
    member.barrier()
    dist.destroy_process_group()
    return value if rank == 0 else None
