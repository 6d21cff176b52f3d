"""Megatron-style training: data x pipeline x tensor parallel, 1F1B, sequence parallel (arXiv
2104.04473, 2205.05198).

One rank per pipeline stage is simulated and represents all tensor and data parallel ranks of that
stage, which do the same at the same time. The forward or backward of one micro-batch on a stage is
one task whose parts are the operators. Messages between stages and the reduction of gradients over
data parallel ranks share the NICs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tileweave.errors import require
from tileweave.sim.collectives import bulk, group_of, phases
from tileweave.sim.document import REQUIRED, Reader, checked, choice, flag, integer
from tileweave.sim.machine import Cluster
from tileweave.sim.network import View, message, view
from tileweave.sim.operators import Mode, Operators
from tileweave.sim.step import Part, Step, Timeline, between, on_links
from tileweave.sim.transformer import Layer, Model, known_model, model_reader


@dataclass(frozen=True, slots=True)
class Training:
    """A training run.

    tp, pp, dp : degrees of parallelism; dp 0: all GPUs that are left.
    global_batch : samples per step.
    micro_batch : samples at once.
    seq : tokens per sample; 0: that of the model.
    recompute : whether there is a second forward before each backward.
    overlap_gradients : reduce gradients layer by layer during the backward of the last micro-batch.
    """

    model: Model
    tp: int = 8
    pp: int = 1
    dp: int = 0
    global_batch: int = 0
    micro_batch: int = 1
    seq: int = 0
    recompute: str = "none"
    overlap_gradients: bool = True

    @property
    def tokens(self) -> int:
        return self.seq or self.model.seq


FIELDS: dict[str, tuple[Reader, Any]] = {
    "model": (model_reader, REQUIRED),
    "tp": (integer(1, 64), 8),
    "pp": (integer(1, 1024), 1),
    "dp": (integer(0, 65536), 0),
    "global_batch": (integer(0, 1_000_000, "samples (0: 8 micro-batches a stage)"), 0),
    "micro_batch": (integer(1, 1024), 1),
    "seq": (integer(0, 1 << 24, "tokens (0: the model's own)"), 0),
    "recompute": (choice(("none", "full")), "none"),
    "overlap_gradients": (flag, True),
}


def by_name(model: str, **fields: Any) -> Training:
    """A training run of a published model."""
    return Training(known_model(model), **checked(fields, FIELDS))


@dataclass(frozen=True)
class _Plan:
    """Degrees that fit the cluster."""

    dp: int
    micro_batches: int
    layers: tuple[int, ...]


def plan(training: Training, cluster: Cluster) -> _Plan:
    """Check that the degrees fit, and compute dp."""
    t, world = training, cluster.world_size
    require(
        t.tp <= cluster.gpus_per_node,
        f"tp {t.tp}",
        f"at most the {cluster.gpus_per_node} GPUs of a node",
        "lower tp",
    )
    require(
        cluster.gpus_per_node % t.tp == 0,
        f"tp {t.tp}",
        f"a divisor of the {cluster.gpus_per_node} GPUs of a node",
        "change tp",
    )
    require(
        world % (t.tp * t.pp) == 0,
        f"tp {t.tp} x pp {t.pp} on {world} GPUs",
        "a divisor of the GPUs",
        "change tp or pp",
    )
    dp = t.dp or world // (t.tp * t.pp)
    require(
        t.tp * t.pp * dp == world,
        f"tp {t.tp} x pp {t.pp} x dp {dp}",
        f"a product of {world}",
        "leave dp out",
    )
    require(
        t.pp <= t.model.layers, f"pp {t.pp}", f"at most the {t.model.layers} layers", "lower pp"
    )
    batch = t.global_batch or 8 * t.pp * dp * t.micro_batch
    require(
        batch % (dp * t.micro_batch) == 0,
        f"global_batch {batch}",
        f"a multiple of dp x micro_batch = {dp * t.micro_batch}",
        "change it",
    )
    layers = tuple(
        t.model.layers // t.pp + (stage < t.model.layers % t.pp) for stage in range(t.pp)
    )
    return _Plan(dp, batch // dp // t.micro_batch, layers)


def simulate(
    training: Training, cluster: Cluster, ops: Operators, mode: Mode, fuse: Any = None
) -> Timeline:
    """One optimiser step."""
    return _Builder(training, cluster, ops, mode, fuse).build()


def samples(training: Training, cluster: Cluster) -> int:
    """Samples of one step."""
    found = plan(training, cluster)
    return found.dp * found.micro_batches * training.micro_batch


class _Builder:
    def __init__(
        self, training: Training, cluster: Cluster, ops: Operators, mode: Mode, fuse: Any
    ) -> None:
        self.t, self.cluster, self.ops, self.mode = training, cluster, ops, mode
        self.plan = plan(training, cluster)
        self.step = Step(
            f"{training.model.name}, tp {training.tp}, pp {training.pp}, dp {self.plan.dp}: {mode}"
        )
        self.layer = Layer(training.model, ops, training.tp, mode, fuse)
        self.protocol = bulk(ops.c)
        self.seen: View = view(cluster, self.protocol.fraction)
        rows = training.micro_batch * training.tokens
        self.forward, self.backward = (
            self.layer.forward(rows, training.tokens),
            self.layer.backward(rows, training.tokens),
        )
        head = self.layer.column("head", rows, self.layer.words, training.model.hidden, "head")
        self.head = (
            [head],
            [*self.layer._column_backward("head", rows, self.layer.words, training.model.hidden)],
        )
        self.message = rows * training.model.hidden * 2.0 / training.tp
        self.sent: dict[tuple[str, int, int], int] = {}

    def build(self) -> Timeline:
        for stage in range(self.t.pp):
            first = stage * self.cluster.world_size // self.t.pp
            ranks = self.cluster.world_size // self.t.pp
            name = f"stage {stage}, ranks {first} to {first + ranks - 1}"
            self.step.representative(stage, ranks, name, self.seen.capacities)
        orders = [
            list(one_f_one_b(stage, self.t.pp, self.plan.micro_batches))
            for stage in range(self.t.pp)
        ]
        position = [0] * self.t.pp
        # add each task after those that it waits for
        while any(position[s] < len(orders[s]) for s in range(self.t.pp)):
            for stage in range(self.t.pp):
                while position[stage] < len(orders[stage]) and self._try(
                    stage, *orders[stage][position[stage]]
                ):
                    position[stage] += 1
        for stage in range(self.t.pp):
            self._update(stage)
        return self.step.run()

    def _try(self, stage: int, what: str, micro: int) -> bool:
        last = self.t.pp - 1
        source = stage - 1 if what == "F" else stage + 1
        needs: list[int] = []
        if 0 <= source <= last:
            if (what, source, micro) not in self.sent:
                return False
            needs = [self.sent[what, source, micro]]
        if what == "F":
            parts = self.forward * self.plan.layers[stage] + (self.head[0] if stage == last else [])
            number = self.step.add(stage, "compute", f"forward {micro}", parts, needs)
            self._send("F", stage, stage + 1, micro, number)
            return True
        parts = (self.head[1] if stage == last else []) + self._backward_parts(stage)
        final = micro == self.plan.micro_batches - 1
        if final and self.t.overlap_gradients and self.plan.dp > 1:
            number = self._last_backward(stage, parts, needs)
        else:
            number = self.step.add(stage, "compute", f"backward {micro}", parts, needs)
            self.last = number
            if final:
                self._gradients(stage, self.plan.layers[stage], [number])
        self._send("B", stage, stage - 1, micro, number)
        return True

    def _backward_parts(self, stage: int) -> list[Part]:
        once = (self.forward if self.t.recompute == "full" else []) + self.backward
        return once * self.plan.layers[stage]

    def _last_backward(self, stage: int, parts: list[Part], needs: list[int]) -> int:
        """The backward in four parts; the gradients of each are reduced while the next is
        computed."""
        pieces = min(4, self.plan.layers[stage])
        bounds = [len(parts) * i // pieces for i in range(pieces + 1)]
        number = -1
        for i in range(pieces):
            number = self.step.add(
                stage, "compute", f"backward, last, {i}", parts[bounds[i] : bounds[i + 1]], needs
            )
            needs = []
            self._gradients(stage, self.plan.layers[stage] / pieces, [number])
        return number

    def _gradients(self, stage: int, layers: float, needs: list[int]) -> None:
        """Reduce-scatter of bf16 gradients and all-gather of parameters over the data parallel
        ranks."""
        if self.plan.dp == 1:
            return
        nbytes = 2.0 * layers * self.t.model.layer_parameters / self.t.tp
        # order of ranks: tensor, then data, then pipeline parallel
        group = group_of(self.cluster, self.plan.dp, self.t.tp)
        make: Callable[[], Any] = lambda: on_links(  # noqa: E731
            phases("all_reduce", nbytes, group, self.seen, self.protocol), stage
        )
        part = Part("gradients", "gradients", 0.0, 0.0, "all_reduce", nbytes, self.plan.dp, "dp")
        self.step.add(stage, "comm", "all-reduce of gradients", [part], needs, "comm", make)

    def _send(self, what: str, stage: int, target: int, micro: int, after: int) -> None:
        if not 0 <= target < self.t.pp:
            return
        per_stage = self.cluster.world_size // self.t.pp
        first, other = stage * per_stage, target * per_stage
        make = lambda: between(  # noqa: E731
            message(self.seen, self.message, first, other, self.protocol.latency), stage, target
        )
        part = Part(f"send {what}", "pipeline", 0.0, 0.0, "send", self.message, 2, "pp")
        self.sent[what, stage, micro] = self.step.add(
            stage,
            "to next" if what == "F" else "to previous",
            f"send {what} {micro}",
            [part],
            [after],
            "comm",
            make,
            target,
        )

    def _update(self, stage: int) -> None:
        """The optimizer, sharded over data parallel ranks: 26 bytes per parameter (fp32 moments and
        master are read and written)."""
        needs = [
            task.number
            for task in self.step.tasks
            if task.rank == stage and task.name == "all-reduce of gradients"
        ]
        parameters = self.plan.layers[stage] * self.t.model.layer_parameters / self.t.tp
        seconds = self.ops.costs.stream(26.0 * parameters / self.plan.dp)
        self.step.add(
            stage,
            "compute",
            "optimiser",
            [Part("optimiser", "optimiser", seconds, compute=seconds)],
            needs,
        )


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """The work of a stage in 1F1B order: ("F" or "B", micro-batch)."""
    warm_up = min(stages - stage - 1, micro_batches)
    for micro in range(warm_up):
        yield "F", micro
    for micro in range(micro_batches - warm_up):
        yield "F", micro + warm_up
        yield "B", micro
    for micro in range(micro_batches - warm_up, micro_batches):
        yield "B", micro
