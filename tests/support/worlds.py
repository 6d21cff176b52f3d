"""Worlds of ranks, one process each, that run functions sent by tests.

A world is started once in a test session, for its backend and size, and serves every test: starting
costs seconds, a job costs milliseconds. ``world.run(function, *args)`` calls ``function(me,
*args)`` on every rank, ``me`` a :class:`Member`, and returns the results of all ranks. The function
is found by its name, so it must be at the top level of its module.

A rank that raises, dies, or is not done in time fails the test with the output of every rank, and
ends the world: the next test gets a new one. Tests that end with a dead rank, or with a signal that
never arrives, run in their own world: :func:`one_shot`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.fork_server import Forked, server

ROOT = Path(__file__).parents[2]
# limit of a wait in tileweave; on GPUs ranks also compile in that time
WAIT_SECONDS = {"gloo": "20", "nccl": "60"}
START_SECONDS = 90
# in the environment: ranks of GPU worlds share device 0 (one_gpu.py)
ON_ONE_GPU = "WORLD_ON_ONE_GPU"
# in the environment: rank 0 serves the store, as without an agent, and not the process of the tests
STORE_IN_RANK = "WORLD_STORE_IN_RANK"
# CPU worlds of more ranks interpret kernels with exploration's numbers and arrays. Worlds of two do
# it with Triton's own tensors, which check types and shapes.
TRITONS_OWN = 2
LAST_WORDS = 6000  # characters of output per rank that a failure shows


@dataclass
class Member:
    """What a function in a world gets: its rank, the size, its device, and subgroups."""

    rank: int
    world_size: int
    device: torch.device
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    def group(self, *ranks: int) -> dist.ProcessGroup | None:
        """The group of these ranks, None on others. Collective over the world at the first call."""
        if ranks not in self.groups:
            self.groups[ranks] = dist.new_group(list(ranks))
        return self.groups[ranks] if self.rank in ranks else None

    def barrier(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            dist.barrier(device_ids=[self.device.index])
            torch.cuda.synchronize()
        else:
            dist.barrier()


# --- In a rank ---


def serve(descriptor: int, rank: int, world_size: int, backend: str, port: int) -> None:
    """Join the world, then do jobs until there are none."""
    pipe = Connection(descriptor)
    faulthandler.enable()  # a crash leaves stacks in this rank's output
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    device = _device(rank, backend)
    pipe.send(_attempt(lambda: _join(rank, world_size, backend, device, port)))
    me = Member(rank, world_size, device)
    while (job := _next(pipe)) is not None:
        module, name, args = job
        pipe.send(_attempt(lambda: getattr(import_module(module), name)(me, *args)))  # noqa: B023 - called at once
    if backend == "nccl" and os.environ.get("WORLD_ENDS_WELL") == "1":
        dist.destroy_process_group()


def _next(pipe: Connection) -> tuple[str, str, tuple[object, ...]] | None:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _attempt(function: Callable[[], object]) -> Answer:
    try:
        return Answer(True, function(), _history())
    except BaseException:
        return Answer(False, traceback.format_exc())


def _history() -> History:
    """For each group of this rank: how many calls it has made, and which of them broke off."""
    if "tileweave.transport.workspace" not in sys.modules:
        return {}
    registry = sys.modules["tileweave.transport.workspace"].REGISTRY
    made = {name: one.ledger.calls for (name, _), one in registry._workspaces.items()}
    names = dist.distributed_c10d._world.pg_names.values()
    return {name: (made.get(name, 0), registry.broken_off(name)) for name in names}


def _device(rank: int, backend: str) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", 0 if ON_ONE_GPU in os.environ else rank)


def _join(rank: int, world_size: int, backend: str, device: torch.device, port: int) -> None:
    torch.set_num_threads(1)
    serves = rank == 0 and STORE_IN_RANK in os.environ
    store = dist.TCPStore("127.0.0.1", port, is_master=serves, wait_for_workers=False)
    options = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if ON_ONE_GPU in os.environ:
            from tests.support import one_gpu

            one_gpu.install()
            backend = one_gpu.BACKEND
        else:
            options["device_id"] = device
    # imports in a first call would make ranks late where waits are short
    if os.environ.get("TRITON_INTERPRET") == "1":
        import_module("tileweave.kernels.all_gather.triton")
        if world_size > TRITONS_OWN:
            _quick_kernels()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)
    dist.barrier()


def _quick_kernels() -> None:
    """Interpret kernels several times faster, without Triton's checks of types and shapes."""
    import_module("tileweave.explore.interpreter").Unscheduled().install()
    # it looks at a word of Triton's language, which is another one now
    registry: Any = import_module("tileweave.ops.core.registry")
    registry._triton_interprets = lambda: True


# --- In the process of the tests ---


def gpu_ranks() -> int:
    """How many ranks a world of GPUs may have here."""
    return int(os.environ.get(ON_ONE_GPU, 0)) or torch.cuda.device_count()


History = dict[str, tuple[int, str]]


@dataclass(frozen=True)
class Answer:
    """What a rank sends at the end of a job: the value and what it leaves to the next job, or a
    traceback."""

    ok: bool
    value: object
    history: History = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a rank of a one-shot world ended."""

    answer: Answer
    exit_code: int | None

    @property
    def value(self) -> object:
        assert self.answer.ok, str(self.answer.value)
        return self.answer.value


def environment_for(backend: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a rank: interpreted kernels and short waits on the CPU, nothing
    inherited from the shell."""
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("TILEWEAVE_", "TRITON_INTERPRET"))
    }
    inherited["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    inherited["OMP_NUM_THREADS"] = inherited["OPENBLAS_NUM_THREADS"] = "1"
    inherited["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    inherited["TILEWEAVE_TIMEOUT"] = WAIT_SECONDS[backend]
    if backend == "gloo":
        inherited["TRITON_INTERPRET"] = "1"
        if sys.platform == "linux":
            inherited["GLOO_SOCKET_IFNAME"] = "lo"
    return inherited | dict(extra)


class World:
    """``size`` ranks over ``backend``: "gloo" on the CPU, "nccl" on GPUs. Started when needed, and
    again after a failure. ``nodes``: emulated; equal parts of the ranks, which share memory inside
    only."""

    def __init__(
        self, backend: str, size: int, extra: Mapping[str, str] | None = None, nodes: int = 1
    ) -> None:
        self.backend, self.size, self.nodes = backend, size, nodes
        extra = extra or {"WORLD_ENDS_WELL": "1"}
        self._environment = environment_for(backend, extra)
        # Imports read none of these variables. Ranks on GPUs are processes of their own.
        usual = environment_for(backend, {})
        late = all(
            name.startswith(("TILEWEAVE_", "WORLD_")) or usual.get(name) == value
            for name, value in extra.items()
        )
        self._forks = late and backend == "gloo" and sys.platform == "linux"
        self._processes: list[subprocess.Popen[bytes] | Forked] = []
        self._pipes: list[Connection] = []
        self._logs: list[tempfile._TemporaryFileWrapper[bytes]] = []
        self._store: dist.TCPStore | None = None
        self._port = 0

    def run(self, function: Callable[..., object], *args: object, timeout: float = 60.0) -> list:
        """Run ``function(me, *args)`` on every rank. Return the values by rank."""
        try:
            self.start()
            self._send(function, args)
            answers = self._collect(time.monotonic() + timeout, grace=3.0)
        except BaseException:  # also at a timeout of pytest: no rank may outlive the test
            self.kill()
            raise
        if len(answers) < self.size or not all(answer.ok for answer in answers.values()):
            self._fail(
                f"{function.__name__} in a world of {self.size} over {self.backend}, {timeout:g} s",
                answers,
            )
        self._require_common_history(function.__name__, [one.history for one in answers.values()])
        return [answers[rank].value for rank in range(self.size)]

    def _require_common_history(self, job: str, histories: list[History]) -> None:
        """Later jobs share the world, and a call that only some ranks have made would meet them."""
        for name in set().union(*histories):
            (one, *others) = [history[name] for history in histories if name in history]
            if any(other != one for other in others):
                self.kill()
                pytest.fail(
                    f"{job} ends without tw.close(), but ranks made other calls: {one}, {others}"
                )

    def run_to_the_end(
        self, function: Callable[..., object], *args: object, timeout: float
    ) -> list[Outcome]:
        """As :meth:`run`, but a rank may raise or die. Every rank then exits by itself. Return how
        each ended, by rank."""
        deadline = time.monotonic() + timeout
        try:
            self.start()
            self._send(function, args)
            answers = self._collect(deadline, grace=timeout)
            if len(answers) < self.size:
                self._fail(f"{function.__name__} in a world of {self.size}, {timeout:g} s", answers)
            for pipe in self._pipes:
                pipe.close()
            while time.monotonic() < deadline and any(
                process.poll() is None for process in self._processes
            ):
                time.sleep(0.02)
            late = [rank for rank, process in enumerate(self._processes) if process.poll() is None]
            if late:
                self._fail(
                    f"{function.__name__}: ranks {late} had not ended after {timeout:g} s", answers
                )
            return [
                Outcome(answers[rank], self._processes[rank].returncode)
                for rank in range(self.size)
            ]
        finally:
            self.kill()

    def start(self) -> None:
        if self._processes:
            return
        if STORE_IN_RANK in self._environment:
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                self._port = found.getsockname()[1]
        else:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._port = self._store.port
        for rank in range(self.size):
            here, there = Pipe()
            log = tempfile.NamedTemporaryFile(prefix=f"rank{rank}-")  # noqa: SIM115 - closed in kill()
            self._processes.append(self._start_rank(rank, there.fileno(), log.fileno()))
            there.close()
            self._pipes.append(here)
            self._logs.append(log)
        answers = self._collect(time.monotonic() + START_SECONDS, grace=3.0)
        if len(answers) < self.size or not all(answer.ok for answer in answers.values()):
            self._fail(f"a world of {self.size} over {self.backend} did not start", answers)

    def _start_rank(self, rank: int, pipe: int, log: int) -> subprocess.Popen[bytes] | Forked:
        arguments = (rank, self.size, self.backend, self._port)
        environment = self._environment
        if self.nodes > 1:
            environment = environment | {"NCCL_HOSTID": f"node {rank * self.nodes // self.size}"}
        if self._forks:
            return server(environment_for(self.backend, {})).fork(
                environment, pipe, log, *arguments
            )
        command = [
            sys.executable,
            "-c",
            f"from tests.support.worlds import serve; serve({pipe}, *{arguments!r})",
        ]
        return subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=log, pass_fds=[pipe]
        )

    def close(self) -> None:
        """Let the ranks exit; kill those that do not."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and any(
            process.poll() is None for process in self._processes
        ):
            time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for held in (*self._pipes, *self._logs):
            held.close()
        self._processes, self._pipes, self._logs, self._store = [], [], [], None

    def _send(self, function: Callable[..., object], args: tuple[object, ...]) -> None:
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args))

    def _collect(self, deadline: float, grace: float) -> dict[int, Answer]:
        """Collect answers by rank, until all have arrived or time is up; for ``grace`` seconds
        after the first failure."""
        answers: dict[int, Answer] = {}
        while len(answers) < self.size and (left := deadline - time.monotonic()) > 0:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            for pipe in wait(open_pipes, left):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    answers[rank] = Answer(False, f"died, exit code {self._processes[rank].wait()}")
                if not answers[rank].ok:
                    deadline = min(deadline, time.monotonic() + grace)
        return answers

    def _fail(self, what: str, answers: dict[int, Answer]) -> None:
        silent = [rank for rank in range(self.size) if rank not in answers]
        for rank in silent:  # ranks that are still running write down where
            if self._processes[rank].poll() is None:
                self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.5 if silent else 0.0)
        parts = [what]
        for rank in range(self.size):
            answer = answers.get(rank)
            said = (
                "was not done" if answer is None else "was done" if answer.ok else str(answer.value)
            )
            log = Path(self._logs[rank].name).read_text("utf-8", errors="replace")[-LAST_WORDS:]
            parts.append(f"--- rank {rank}: {said}\n{log}".rstrip())
        self.kill()
        pytest.fail("\n".join(parts), pytrace=False)


class Worlds:
    """The worlds of a test session, by backend, size and number of nodes."""

    def __init__(self) -> None:
        self._worlds: dict[tuple[str, int, int], World] = {}

    def __call__(self, backend: str, size: int, nodes: int = 1) -> World:
        key = (backend, size, nodes)
        return self._worlds.setdefault(key, World(backend, size, nodes=nodes))

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()


def one_shot(
    backend: str,
    size: int,
    function: Callable[..., object],
    *args: object,
    extra: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    nodes: int = 1,
) -> list[Outcome]:
    """Run ``function`` in its own world until every process has ended by itself. Return how each
    ended, by rank."""
    world = World(backend, size, extra or {"WORLD_ENDS_WELL": "0"}, nodes)
    return world.run_to_the_end(function, *args, timeout=timeout)
