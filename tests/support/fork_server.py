"""Fork processes for ranks and scripts from one that has imported torch, triton and the package.

Imports cost 1.5 s of CPU time per process, and 3 s where ``torch.compile`` is called; a fork costs
milliseconds. The server starts no threads and touches no device, so a fork is in the same state as
a new process after the same imports. Each fork gets its own environment, pipe and output.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[2]
IMPORTS = (
    "torch._dynamo",
    "tests.support.worlds",
    "tests.support.behaviour",
    "tileweave.explore.interpreter",
)
FULL_END = "WORLD_FULL_END"  # in the environment: ranks end as a Python process does
LARGEST = 1 << 16  # bytes of a message: an environment
SELDOM = 50_000  # new objects per collection: nearly all go with their last reference


# --- In the server ---


def main(descriptor: int) -> None:
    """Fork on request and report how each fork ended, until the test process closes its end."""
    requests = socket.socket(fileno=descriptor)
    for module in IMPORTS:
        import_module(module)
    kernels = import_module("tileweave.kernels")
    for found in walk_packages(kernels.__path__, "tileweave.kernels."):
        import_module(found.name)
    # a fork neither copies these objects nor scans them when it ends, which took 0.8 s
    gc.freeze()
    gc.set_threshold(SELDOM)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        if woken in select.select([requests, woken], [], [])[0]:
            os.read(woken, LARGEST)
            _report(requests)
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, LARGEST, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for ours in (woken, wake):
                os.close(ours)
            requests.close()
            _become(pickle.loads(message), *descriptors)
            return
        for theirs in descriptors:
            os.close(theirs)
        requests.send(pickle.dumps(("started", pid, 0)))


def _report(requests: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            requests.send(pickle.dumps(("ended", ended[0], os.waitstatus_to_exitcode(ended[1]))))


def _become(request: tuple[dict[str, str], Any], pipe: int, log: int) -> None:
    """In a fork: run as the requested rank, or a script."""
    environment, arguments = request
    os.environ.clear()
    os.environ.update(environment)
    if isinstance(arguments, list):
        _run_script(arguments, pipe, log)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    import_module("tests.support.worlds").serve(pipe, *arguments)
    if FULL_END not in os.environ:
        _end()


def _end() -> NoReturn:
    """End as a child of multiprocessing does. What Python does besides, to take its modules apart,
    costs 0.4 s of CPU time: it writes to nearly all pages that the fork shares."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run_script(words: list[str], out: int, err: int) -> NoReturn:
    """As ``python *words`` does: a file, or ``-c`` and a text. It forks its ranks, too."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    launcher: Any = import_module("tileweave.launcher")
    launcher._start_method = lambda: "fork"
    inline = words[0] == "-c"
    sys.argv[:] = [words[0], *words[2:]] if inline else words
    code: object = 0
    try:
        if inline:
            sys.modules["__main__"] = module = ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), module.__dict__)
        else:
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        code = traceback.format_exc()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code is not None and code != 0))


# --- In the process of the tests ---


class Forked:
    """One fork, with the part of the interface of :class:`subprocess.Popen` that worlds use."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self._server.listen(0.0)
            self.returncode = self._server.ended.pop(self.pid, None)
        return self.returncode

    def wait(self, seconds: float = float("inf")) -> int:
        """The exit code. After ``seconds`` the process is killed."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            self._server.listen(min(1.0, max(deadline - time.monotonic(), 0.0)))
            if time.monotonic() > deadline:
                self.kill()
                deadline = float("inf")
        assert self.returncode is not None, "it has ended"
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that forks. All of its forks share the values of ``environment`` that imports
    read."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            sys.executable,
            "-c",
            f"from tests.support.fork_server import main; main({theirs.fileno()})",
        ]
        self._process = subprocess.Popen(
            command, env=environment, cwd=ROOT, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._started: list[int] = []
        self.ended: dict[int, int] = {}
        atexit.register(self.close)

    def fork(
        self, environment: Mapping[str, str], pipe: int, log: int, *arguments: object
    ) -> Forked:
        """``tests.support.worlds.serve(pipe, *arguments)`` in a fork that writes to ``log``."""
        return self._forked((dict(environment), arguments), [pipe, log])

    def script(
        self, environment: Mapping[str, str], words: Sequence[str], out: IO[str], err: IO[str]
    ) -> Forked:
        """``python *words`` in a fork whose kernels are interpreted: a file and its arguments, or
        ``-c``, a text and its arguments."""
        return self._forked((dict(environment), list(words)), [out.fileno(), err.fileno()])

    def _forked(self, request: object, descriptors: list[int]) -> Forked:
        socket.send_fds(self._requests, [pickle.dumps(request)], descriptors)
        while not self._started:
            self.listen(1.0)
        return Forked(self, self._started.pop())

    def listen(self, seconds: float) -> None:
        """Read all reports of the server; wait at most ``seconds`` for the first one."""
        while select.select([self._requests], [], [], seconds)[0]:
            report = self._requests.recv(LARGEST)
            if not report:
                raise RuntimeError(f"the fork server ended with exit code {self._process.wait()}")
            kind, pid, code = pickle.loads(report)
            if kind == "started":
                self._started.append(pid)
            else:
                self.ended[pid] = code
            seconds = 0.0

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


_SERVERS: list[Server] = []


def server(environment: Mapping[str, str]) -> Server:
    """The server of this process, started at the first call."""
    if not _SERVERS:
        _SERVERS.append(Server(environment))
    return _SERVERS[0]
