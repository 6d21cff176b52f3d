"""What a machine is, as frozen facts: no torch, no triton, nothing is queried here.

``transport.cuda.describe`` fills a :class:`Machine` from the devices at hand; tests and the
simulator make their own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """One rank's device and its links.

    Attributes
    ----------
    backend : ``"cuda"``, ``"hip"`` or ``"cpu"``.
    arch : compute capability times ten (90 for Hopper), 0 where it means nothing.
    num_sms : streaming multiprocessors; 1 on the CPU.
    shared_bytes : shared memory one program may use, bytes.
    flops : dense bf16 rate that a large matmul sustains, flop/s.
    memory_rate : device memory, bytes/s, as a stream reads it.
    link_rate : bytes/s that a rank sends when all ranks send to all peers at once.
    link_latency : seconds from a remote store to a peer's seeing its signal.
    """

    name: str
    backend: str
    arch: int = 0
    num_sms: int = 1
    shared_bytes: int = 0
    flops: float = 0.0
    memory_rate: float = 0.0
    link_rate: float = 0.0
    link_latency: float = 0.0


# Rates measured with four GPUs of one host, bf16, random data, power-capped at 700 W, 2026-11.
H200 = Machine("NVIDIA H200", "cuda", 90, 132, 232448, 7.2e14, 4.1e12, 3.4e11, 2.0e-6)
CPU = Machine("cpu", "cpu")


def preset(name: str, backend: str, arch: int, num_sms: int, shared_bytes: int) -> Machine:
    """A :class:`Machine` for a device we have no measurement of: H200 rates scaled by its multiprocessors."""
    if name == H200.name:
        return H200
    share = num_sms / H200.num_sms
    return Machine(
        name,
        backend,
        arch,
        num_sms,
        shared_bytes,
        H200.flops * share,
        H200.memory_rate * share,
        H200.link_rate,
        H200.link_latency,
    )
