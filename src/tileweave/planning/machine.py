"""The facts of a machine that planning needs. No torch, no triton; nothing is queried here.

``transport.cuda.describe`` makes a :class:`Machine` of a device; tests and the simulator make
their own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """One rank's device.

    Attributes
    ----------
    backend : ``"cuda"``, ``"hip"`` or ``"cpu"``.
    arch : compute capability times ten (90 for Hopper); 0 if the device has none.
    num_sms : streaming multiprocessors; 1 on the CPU.
    """

    name: str
    backend: str
    arch: int = 0
    num_sms: int = 1


H200 = Machine("NVIDIA H200", "cuda", 90, 132)
CPU = Machine("cpu", "cpu")
