"""Megatron-style training: data x pipeline x context x tensor parallel (arXiv 2104.04473,
2205.05198).

One rank per pipeline stage is simulated and represents all tensor, context and data parallel ranks
of that stage, which do the same at the same time. The forward or backward of one micro-batch on a
part of a stage is one task whose parts are the operators. Messages between stages and the
reduction of gradients over data parallel ranks share the NICs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tileweave.errors import require
from tileweave.sim.collectives import bulk, group_of, phases, protocol_of
from tileweave.sim.document import checked, choice, fields_of, flag, integer
from tileweave.sim.machine import Cluster
from tileweave.sim.network import View, alone, message, view
from tileweave.sim.operators import Mode, Operators
from tileweave.sim.schedules import Work, one_f_one_b, zero_bubble
from tileweave.sim.step import Part, Step, Timeline, between, on_links
from tileweave.sim.transformer import Layer, Model, Style, known_model, model_reader

# Seconds of the host per kernel that an eager step launches: NVIDIA dgxc-benchmarking,
# microbenchmarks/cpu_overhead (2026): 11 to 18 us per tiny matmul of torch on a host of H100.
LAUNCH = 12e-6
SHARDINGS = ("none", "optimizer", "gradients", "parameters")


@dataclass(frozen=True, slots=True)
class Training:
    """A training run.

    tp, pp, dp : degrees of parallelism; dp 0: all GPUs that are left.
    global_batch : samples per step.
    micro_batch : samples at once.
    seq : tokens per sample; 0: that of the model.
    recompute : ``selective``: the scores of attention once more before each backward, where they
        are not fused; ``full``: a second forward.
    overlap_gradients : reduce gradients during the backward of the last micro-batch, and gather
        parameters during the first forward.
    virtual_pipeline : parts of the model on each stage (interleaved 1F1B).
    context_parallel : ranks that share a sequence.
    schedule : ``1f1b`` or ``zero_bubble`` (ZB-H1).
    gradients : ``fp32`` (Megatron's default) or ``bf16``: how they are kept and reduced.
    sharding : what data parallel ranks share out (ZeRO 0 to 3): ``none``, ``optimizer`` (Megatron's
        distributed optimizer), ``gradients`` too, ``parameters`` too (FSDP).
    attention : ``fused``, or ``unfused`` as in 2021.
    sequence_parallel : False: all-reduces, as in 2021.
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
    virtual_pipeline: int = 1
    context_parallel: int = 1
    schedule: str = "1f1b"
    gradients: str = "fp32"
    sharding: str = "optimizer"
    attention: str = "fused"
    sequence_parallel: bool = True

    @property
    def tokens(self) -> int:
        return self.seq or self.model.seq

    @property
    def rows(self) -> int:
        """Rows of a micro-batch that a tensor-parallel group has."""
        return self.micro_batch * self.tokens // self.context_parallel

    @property
    def gradient_bytes(self) -> float:
        return 4.0 if self.gradients == "fp32" else 2.0


FIELDS = fields_of(
    Training,
    model=model_reader,
    tp=integer(1, 64),
    pp=integer(1, 1024),
    dp=integer(0, 65536),
    global_batch=integer(0, 1_000_000, "samples (0: 8 micro-batches a stage)"),
    micro_batch=integer(1, 1024),
    seq=integer(0, 1 << 24, "tokens (0: the model's own)"),
    recompute=choice(("none", "selective", "full")),
    overlap_gradients=flag,
    virtual_pipeline=integer(1, 64, "parts of the model on each stage"),
    context_parallel=integer(1, 64, "ranks"),
    schedule=choice(("1f1b", "zero_bubble")),
    gradients=choice(("fp32", "bf16")),
    sharding=choice(SHARDINGS),
    attention=choice(("fused", "unfused")),
    sequence_parallel=flag,
)


def by_name(model: str, **fields: Any) -> Training:
    """A training run of a published model."""
    return Training(known_model(model), **checked(fields, FIELDS))


@dataclass(frozen=True)
class Plan:
    """Degrees that fit the cluster. ``layers[stage][chunk]``: of each part of each stage."""

    dp: int
    micro_batches: int
    layers: tuple[tuple[int, ...], ...]


def plan(training: Training, cluster: Cluster) -> Plan:
    """Check that the degrees fit, and compute dp."""
    t, world, per_node = training, cluster.world_size, cluster.gpus_per_node
    require(
        per_node % t.tp == 0 or t.tp % per_node == 0,
        f"tp {t.tp}",
        f"a divisor or a multiple of the {per_node} GPUs of a node",
        "change tp",
    )
    degrees = f"tp {t.tp} x pp {t.pp}" + (
        f" x context_parallel {t.context_parallel}" if t.context_parallel > 1 else ""
    )
    shards = t.tp * t.pp * t.context_parallel
    require(
        world % shards == 0,
        f"{degrees} on {world} GPUs",
        "a divisor of the GPUs",
        "change tp or pp",
    )
    dp = t.dp or world // shards
    require(shards * dp == world, f"{degrees} x dp {dp}", f"a product of {world}", "leave dp out")
    _check_sequence(t)
    batch = t.global_batch or usual_batch(t, cluster)
    require(
        batch % (dp * t.micro_batch) == 0,
        f"global_batch {batch}",
        f"a multiple of dp x micro_batch = {dp * t.micro_batch}",
        "change it",
    )
    micro_batches = batch // dp // t.micro_batch
    _check_schedule(t, micro_batches)
    parts = t.pp * t.virtual_pipeline
    each = _divided(t.model.layers, parts)
    layers = tuple(tuple(each[stage :: t.pp]) for stage in range(t.pp))
    return Plan(dp, micro_batches, layers)


def _divided(layers: int, parts: int) -> list[int]:
    """Layers of each part of the model. Where that makes all equal, the embedding and the head
    count as a layer each (as in NeMo's ``account_for_embedding_in_pipeline_split``)."""
    if layers % parts and (layers + 2) % parts == 0:
        each = [(layers + 2) // parts] * parts
        each[0] -= 1
        each[-1] -= 1
        return each
    return [layers // parts + (part < layers % parts) for part in range(parts)]


def usual_batch(t: Training, cluster: Cluster) -> int:
    """Samples per step where none are asked for: eight micro-batches per stage."""
    dp = t.dp or max(cluster.world_size // (t.tp * t.pp * t.context_parallel), 1)
    return 8 * t.pp * dp * t.micro_batch


def _check_sequence(t: Training) -> None:
    cp = t.context_parallel
    require(
        cp == 1 or t.tokens % (2 * cp) == 0,
        f"context_parallel {cp} of {t.tokens} tokens",
        "a sequence of 2 * context_parallel equal pieces (causal load is balanced by pairs)",
        "change one of both",
    )
    require(
        cp == 1 or t.attention == "fused",
        f"context_parallel {cp} with attention: unfused",
        "attention: fused",
        "change one of both",
    )


def _check_schedule(t: Training, micro_batches: int) -> None:
    parts = t.pp * t.virtual_pipeline
    require(
        parts <= t.model.layers or parts == t.model.layers + 2,
        f"pp {t.pp} x virtual_pipeline {t.virtual_pipeline}" if parts > t.pp else f"pp {t.pp}",
        f"at most the {t.model.layers} layers",
        "lower one of both" if parts > t.pp else "lower pp",
    )
    if t.virtual_pipeline > 1:
        require(
            t.pp > 1 and micro_batches % t.pp == 0,
            f"virtual_pipeline {t.virtual_pipeline} with pp {t.pp}, {micro_batches} micro-batches",
            "pp above 1, and micro-batches that are a multiple of it",
            "change global_batch or pp, or leave virtual_pipeline out",
        )
    require(
        t.schedule == "1f1b" or t.virtual_pipeline == 1,
        f"schedule {t.schedule} with virtual_pipeline {t.virtual_pipeline}",
        "virtual_pipeline 1, or schedule 1f1b",
        "leave one of both out",
    )
    require(
        t.schedule == "1f1b" or t.sharding in ("none", "optimizer"),
        f"schedule {t.schedule} with sharding {t.sharding}",
        "sharding none or optimizer, or schedule 1f1b",
        "change one of both",
    )
    require(
        t.pp == 1 or t.sharding in ("none", "optimizer"),
        f"sharding {t.sharding} with pp {t.pp}",
        "sharding none or optimizer, or pp 1",
        "change one of both",
    )


def simulate(
    training: Training, cluster: Cluster, ops: Operators, mode: Mode, fuse: Any = None
) -> Timeline:
    """One optimiser step."""
    return _Builder(training, cluster, ops, mode, fuse).build()


def estimate(training: Training, cluster: Cluster, ops: Operators, mode: Mode) -> float:
    """Seconds of a step without a schedule: the work of the busiest stage, the idle time of the
    pipeline, and collectives of data parallel ranks where they are longer than what hides them."""
    return _Builder(training, cluster, ops, mode, None).estimate()


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
        t = training
        self.step = Step(f"{t.model.name}, tp {t.tp}, pp {t.pp}, dp {self.plan.dp}: {mode}")
        # order of ranks: tensor, then context, then data, then pipeline parallel
        style = Style(
            t.attention == "fused",
            t.sequence_parallel,
            group_of(cluster, t.context_parallel, t.tp),
        )
        self.layer = Layer(t.model, ops, t.tp, mode, fuse, style)
        self.shards = group_of(cluster, self.plan.dp * t.context_parallel, t.tp)
        self.protocol = bulk(ops.c)
        self.seen: View = view(cluster, self.protocol.fraction)
        self.forward = self.layer.forward(t.rows, t.tokens)
        again = self._again()
        if t.schedule == "zero_bubble":
            inputs, weights = self.layer.backward(t.rows, t.tokens)
            self.backward, self.weights = again + inputs, weights
        else:
            self.backward, self.weights = again + self.layer.joint_backward(t.rows, t.tokens), []
        self.message = t.rows * t.model.hidden * 2.0 / t.tp
        self.sent: dict[tuple[str, int, int], int] = {}
        self.messages: dict[tuple[int, int], float] = {}
        self.reduced: dict[int, list[int]] = {stage: [] for stage in range(t.pp)}

    def _again(self) -> list[Part]:
        """What is computed once more before a backward."""
        if self.t.recompute == "full":
            return self.forward
        if self.t.recompute == "selective" and self.t.attention == "unfused":
            return [part for part in self.forward if part.name == "attention"]
        return []

    def _head(self) -> dict[str, list[Part]]:
        """The projection to words, which the last part of the last stage has too."""
        t, layer = self.t, self.layer
        sizes = ("head", t.rows, layer.words, t.model.hidden)
        column = layer.column if t.sequence_parallel else layer.local_column
        gradients = (
            [*layer.column_backward(*sizes)]
            if t.schedule == "zero_bubble"
            else layer.joint_column_backward(*sizes)
        )
        return {"F": [column(*sizes, "head")], "B": gradients, "W": []}

    def build(self) -> Timeline:
        pp = self.t.pp
        for stage in range(pp):
            ranks = self.cluster.world_size // pp
            name = f"stage {stage}, ranks {stage * ranks} to {(stage + 1) * ranks - 1}"
            self.step.representative(stage, ranks, name, self.seen.capacities)
        self.parts = self._parts()
        orders = [list(self._order(stage)) for stage in range(pp)]
        position = [0] * pp
        left = sum(map(len, orders))
        # add each task after those that it waits for
        while left:
            before = left
            for stage in range(pp):
                order = orders[stage]
                while position[stage] < len(order) and self._try(stage, order[position[stage]]):
                    position[stage] += 1
                    left -= 1
            assert left < before, "a schedule whose stages wait for each other"
        for stage in range(pp):
            self._update(stage)
        return self.step.run()

    def estimate(self) -> float:
        t, found = self.t, self.plan
        parts = self._parts()

        def seconds(stage: int, kinds: str) -> float:
            return sum(
                part.seconds
                for chunk in range(t.virtual_pipeline)
                for what in kinds
                for part in parts[what, stage, chunk]
            )

        busy = [seconds(stage, "FBW") for stage in range(t.pp)]
        idle = (t.pp - 1) * (seconds(0, "FBW" if not self.weights else "F")) / t.virtual_pipeline
        total = found.micro_batches * max(busy) + idle
        if self.shards.size > 1:
            times = found.micro_batches if t.sharding in ("gradients", "parameters") else 1
            size = sum(found.layers[0]) * t.model.layer_parameters / t.tp
            kinds = ("all_gather", 2.0, "F"), ("reduce_scatter", t.gradient_bytes, "B")
            for kind, itemsize, what in kinds:
                comm = self.ops.collective(kind, itemsize * size, self.shards)
                total += times * max(comm - seconds(0, what), 0.0)
        return total

    def _order(self, stage: int) -> Iterator[Work]:
        t, micro_batches = self.t, self.plan.micro_batches
        if t.schedule == "zero_bubble":
            return zero_bubble(stage, t.pp, micro_batches)
        return one_f_one_b(stage, t.pp, micro_batches, t.virtual_pipeline)

    def _parts(self) -> dict[tuple[str, int, int], list[Part]]:
        """The operators of each kind of work, by (what, stage, chunk)."""
        t = self.t
        head = self._head()
        found = {}
        for stage in range(t.pp):
            for chunk, layers in enumerate(self.plan.layers[stage]):
                last = stage == t.pp - 1 and chunk == t.virtual_pipeline - 1
                for what, parts in (("F", self.forward), ("B", self.backward), ("W", self.weights)):
                    ends = head[what] if last else []
                    whole = parts * layers + ends if what == "F" else ends + parts * layers
                    found[what, stage, chunk] = _launched(whole)
        return found

    def _try(self, stage: int, work: Work) -> bool:
        """Add a task, unless what it waits for has not been added yet."""
        what, micro, chunk = work
        t, pp = self.t, self.t.pp
        place = chunk * pp + stage  # among all parts of the model
        final = micro == self.plan.micro_batches - 1
        if what == "W":
            self._compute(stage, work, self.parts[what, stage, chunk], [], reduces=final)
            return True
        source = place - 1 if what == "F" else place + 1
        needs: list[int] = []
        if 0 <= source < pp * t.virtual_pipeline:
            if (what, source, micro) not in self.sent:
                return False
            needs = [self.sent[what, source, micro]]
        every = t.sharding == "parameters"
        number = self._compute(
            stage,
            work,
            self.parts[what, stage, chunk],
            needs,
            gathers=every or (what == "F" and micro == 0 and t.sharding != "none"),
            reduces=what == "B"
            and (final or t.sharding in ("gradients", "parameters"))
            and not self.weights,
        )
        self._send(what, place, place + 1 if what == "F" else place - 1, micro, number)
        return True

    def _compute(
        self,
        stage: int,
        work: Work,
        parts: list[Part],
        needs: list[int],
        gathers: bool = False,
        reduces: bool = False,
    ) -> int:
        """The work in one task; where it gathers parameters or reduces gradients over data parallel
        ranks, in four, so that each part of these overlaps the next part of the work."""
        names = {"F": "forward", "B": "backward", "W": "weights"}
        name = f"{names[work.what]} {work.micro}" + (
            f", part {work.chunk}" if self.t.virtual_pipeline > 1 else ""
        )
        layers = self.plan.layers[stage][work.chunk]
        shared = self.shards.size > 1 and layers > 0
        if not shared or not (gathers or reduces):
            return self.step.add(stage, "compute", name, parts, needs)
        pieces = min(4, layers)
        bounds = [len(parts) * i // pieces for i in range(pieces + 1)]
        done: list[int] = []
        for i in range(pieces):
            waits = needs if i == 0 else []
            if gathers:  # no further ahead than the piece after the one that is computed
                waits = [*waits, self._gather(stage, layers / pieces, done[-2:-1])]
            chosen = parts[bounds[i] : bounds[i + 1]]
            done.append(self.step.add(stage, "compute", f"{name}, {i}", chosen, waits))
            if reduces and self.t.overlap_gradients:
                self._reduce(stage, layers / pieces, done[-1:])
        if reduces and not self.t.overlap_gradients:
            self._reduce(stage, layers, done[-1:])
        return done[-1]

    def _gather(self, stage: int, layers: float, needs: list[int]) -> int:
        """The all-gather of bf16 parameters, of which data parallel ranks have one part each."""
        nbytes = 2.0 * layers * self.t.model.layer_parameters / self.t.tp
        return self._over_shards(stage, "all_gather", "parameters", nbytes, needs)

    def _reduce(self, stage: int, layers: float, needs: list[int]) -> None:
        """Gradients: reduce-scattered to the ranks that have their part of the optimizer."""
        nbytes = self.t.gradient_bytes * layers * self.t.model.layer_parameters / self.t.tp
        kind = "all_reduce" if self.t.sharding == "none" else "reduce_scatter"
        number = self._over_shards(stage, kind, "gradients", nbytes, needs)
        self.reduced[stage].append(number)

    def _over_shards(
        self, stage: int, kind: Any, name: str, nbytes: float, needs: list[int]
    ) -> int:
        group, device = self.shards, self.cluster.device
        protocol = protocol_of(self.ops.c, kind, nbytes, group.inside, device=device)
        seen = view(self.cluster, self.protocol.fraction)
        scale = protocol.fraction / self.protocol.fraction

        def make() -> Any:
            made = phases(kind, nbytes, group, seen, protocol)
            for flows in made:  # links inside the node at the rate of this collective
                for flow in flows:
                    flow.loads = {
                        link: load if link.startswith(_BETWEEN) else load / scale
                        for link, load in flow.loads.items()
                    }
            return on_links(made, stage)

        part = Part(name, "gradients", 0.0, 0.0, kind, nbytes, group.size, "dp")
        return self.step.add(
            stage, "comm", f"{kind.replace('_', '-')} of {name}", [part], needs, "comm", make
        )

    def _send(self, what: str, place: int, target: int, micro: int, after: int) -> None:
        """A message from one part of the model to the next, if that is on another stage."""
        pp = self.t.pp
        if not 0 <= target < pp * self.t.virtual_pipeline:
            return
        stage, other = place % pp, target % pp
        if stage == other:
            self.sent[what, place, micro] = after
            return
        per_stage = self.cluster.world_size // pp
        ends = (stage * per_stage, other * per_stage)

        def make() -> Any:
            sent = message(self.seen, self.message, *ends, self.protocol.latency)
            return between(sent, stage, other)

        # Only messages of the first and the last micro-batch share links with collectives of data
        # parallel ranks, and on a torus messages with each other.
        idle = (
            0 < micro < self.plan.micro_batches - 1
            and self.cluster.network.topology != "torus"
            and self.t.sharding in ("none", "optimizer")
        )
        seconds = self._alone(*ends) if idle else 0.0
        part = Part(f"send {what}", "pipeline", seconds, 0.0, "send", self.message, 2, "pp")
        self.sent[what, place, micro] = self.step.add(
            stage,
            "to next" if what == "F" else "to previous",
            f"send {what} {micro}",
            [part],
            [after],
            "comm",
            None if idle else make,
            other,
        )

    def _alone(self, first: int, other: int) -> float:
        """Seconds of a message on idle links."""
        if (first, other) not in self.messages:
            flow = message(self.seen, self.message, first, other, self.protocol.latency)
            self.messages[first, other] = alone(self.seen, flow)
        return self.messages[first, other]

    def _update(self, stage: int) -> None:
        """The optimizer: fp32 moments and master are read and written, the gradient is read, the
        bf16 parameter written. Sharded over data parallel ranks unless nothing is."""
        parameters = sum(self.plan.layers[stage]) * self.t.model.layer_parameters / self.t.tp
        shards = 1 if self.t.sharding == "none" else self.shards.size
        nbytes = (26.0 + self.t.gradient_bytes) * parameters / shards
        seconds = self.ops.costs.stream(nbytes)
        part = Part("optimiser", "optimiser", seconds, compute=seconds)
        self.step.add(stage, "compute", "optimiser", [part], self.reduced[stage])


_BETWEEN = ("nic_", "leaf_", "torus")


def _launched(parts: list[Part]) -> list[Part]:
    """The parts of a task, and the time that the host adds where it is slower than the device. Each
    part is a kernel, and where it communicates another one."""
    host = LAUNCH * sum(2 if part.collective else 1 for part in parts)
    wait = host - sum(part.seconds for part in parts)
    if wait <= 0.0:
        return parts
    return [*parts, Part("host", "host", wait, compute=wait)]
