"""The facts of a machine that planning needs. No torch, no triton; nothing is queried here.

``transport.cuda.describe`` makes a :class:`Machine` of a device; tests and the simulator make
their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernels = Literal["all", "portable"]
KERNELS: tuple[Kernels, ...] = ("all", "portable")


@dataclass(frozen=True, slots=True)
class Machine:
    """One rank's device.

    Attributes
    ----------
    backend : ``"cuda"``, ``"hip"`` or ``"cpu"``.
    arch : compute capability times ten (90 for Hopper); 0 if the device has none.
    num_sms : streaming multiprocessors; 1 on the CPU.
    kernels : which kernels may run: ``"portable"`` leaves out those for one architecture.
    unreachable : why the memory of other devices cannot be mapped; "" if it can.
    """

    name: str
    backend: str
    arch: int = 0
    num_sms: int = 1
    kernels: Kernels = "all"
    unreachable: str = ""

    @property
    def hopper(self) -> bool:
        """Whether the kernels for Hopper run."""
        return self.arch == 90 and self.kernels == "all"


H200 = Machine("NVIDIA H200", "cuda", 90, 132)
CPU = Machine("cpu", "cpu")
