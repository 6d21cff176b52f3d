"""Chakra execution traces (MLCommons, schema 0.0.4 as ASTRA-sim 2 reads it): a step as one ``.et``
file per rank.

A file is a stream of protobuf messages, each after its length as a varint: one GlobalMetadata, then
nodes. Computation is a COMP_NODE with a duration, a collective a COMM_COLL_NODE, a message between
stages a COMM_SEND_NODE and a COMM_RECV_NODE. A fused operator is a chain of ``slices`` pairs of
computation and collective, so that simulators that only know whole collectives can overlap them. As
ASTRA-sim requires, the names of groups are numbers from 1 on, and ``comm_size`` of an all-gather is
the part of one rank. Only these fields are written; other fields of the schema are ignored when
reading. ``replay.py`` makes a timeline of traces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from tileweave.errors import InputError, require
from tileweave.sim.step import Part, Task, Timeline

VERSION = "0.0.4"
COMP, SEND, RECV, COLL = 4, 5, 6, 7
COLLECTIVES = {"all_reduce": 0, "all_gather": 2, "all_to_all": 6, "reduce_scatter": 7}
MOST_NODES = 2_000_000

_Type = descriptor_pb2.FieldDescriptorProto
# message -> field -> (number, type, repeated, message type), as in the schema; other fields are
# skipped when reading.
_SCHEMA: dict[str, dict[str, tuple[int, int, bool, str]]] = {
    "BoolList": {"values": (1, _Type.TYPE_BOOL, True, "")},
    "AttributeProto": {
        "name": (1, _Type.TYPE_STRING, False, ""),
        "int64_val": (9, _Type.TYPE_INT64, False, ""),
        "uint64_val": (13, _Type.TYPE_UINT64, False, ""),
        "bool_val": (27, _Type.TYPE_BOOL, False, ""),
        "bool_list": (28, _Type.TYPE_MESSAGE, False, "BoolList"),
        "string_val": (29, _Type.TYPE_STRING, False, ""),
    },
    "GlobalMetadata": {
        "version": (1, _Type.TYPE_STRING, False, ""),
        "attr": (2, _Type.TYPE_MESSAGE, True, "AttributeProto"),
    },
    "Node": {
        "id": (1, _Type.TYPE_UINT64, False, ""),
        "name": (2, _Type.TYPE_STRING, False, ""),
        "type": (3, _Type.TYPE_INT32, False, ""),
        "ctrl_deps": (4, _Type.TYPE_UINT64, True, ""),
        "data_deps": (5, _Type.TYPE_UINT64, True, ""),
        "start_time_micros": (6, _Type.TYPE_UINT64, False, ""),
        "duration_micros": (7, _Type.TYPE_UINT64, False, ""),
        "attr": (10, _Type.TYPE_MESSAGE, True, "AttributeProto"),
    },
}


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="tileweave_chakra.proto", package="ChakraProtoMsg", syntax="proto3"
    )
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind, repeated, of) in fields.items():
            label = _Type.LABEL_REPEATED if repeated else _Type.LABEL_OPTIONAL
            message.field.add(
                name=field_name,
                number=number,
                type=kind,
                label=label,
                type_name=f".ChakraProtoMsg.{of}" if of else None,
            )
            if name == "AttributeProto" and field_name != "name":
                message.field[-1].oneof_index = 0
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in _SCHEMA
    }


_MESSAGES = _messages()


@dataclass(slots=True)
class Node:
    """A node of a trace. ``attributes``: name -> int, bool, str or list of bool."""

    number: int
    name: str
    kind: int
    after: list[int] = field(default_factory=list)
    micros: int = 0
    start: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)


def write_trace(target: BinaryIO, nodes: Iterator[Node] | list[Node]) -> None:
    """Write the nodes of one rank as a trace."""
    _put(target, _MESSAGES["GlobalMetadata"](version=VERSION))
    for node in nodes:
        message = _MESSAGES["Node"](
            id=node.number,
            name=node.name,
            type=node.kind,
            data_deps=node.after,
            duration_micros=node.micros,
            start_time_micros=node.start,
        )
        for name, value in node.attributes.items():
            attribute = message.attr.add(name=name)
            if isinstance(value, bool):
                attribute.bool_val = value
            elif isinstance(value, int):
                attribute.int64_val = value
            elif isinstance(value, list):
                attribute.bool_list.values.extend(value)
            else:
                attribute.string_val = value
        _put(target, message)


def _put(target: BinaryIO, message: Any) -> None:
    data = message.SerializeToString()
    size, prefix = len(data), bytearray()
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    target.write(bytes([*prefix, size]) + data)


def _size_at(data: bytes, position: int) -> tuple[int, int]:
    """A varint of at most 10 bytes at ``position``, and where it ends."""
    size = shift = 0
    while True:
        if shift >= 70:
            raise DecodeError(f"no length of a message at byte {position}")
        byte = data[position]
        size |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return size, position


def read_trace(data: bytes, name: str = "trace") -> tuple[str, list[Node]]:
    """(schema version, nodes) of a trace."""
    position, nodes, version = 0, [], ""
    try:
        while position < len(data):
            size, position = _size_at(data, position)
            piece = data[position : position + size]
            if len(piece) < size:
                raise DecodeError("the file ends inside a message")
            position += size
            if not version:
                version = _MESSAGES["GlobalMetadata"].FromString(piece).version or "unnamed"
                continue
            message = _MESSAGES["Node"].FromString(piece)
            attributes = {a.name: _value(a) for a in message.attr}
            after = [*message.data_deps, *message.ctrl_deps]
            nodes.append(
                Node(
                    message.id,
                    message.name,
                    message.type,
                    after,
                    message.duration_micros,
                    message.start_time_micros,
                    attributes,
                )
            )
    except (DecodeError, IndexError) as error:
        raise InputError(
            f"asked: {name}: {error}; allowed: a Chakra .et file; remedy: check which file it is"
        ) from None
    require(bool(version), f"{name}, which is empty", "a Chakra .et file", "check which file it is")
    return version, nodes


def _value(attribute: Any) -> Any:
    which = attribute.WhichOneof("value")
    if which is None:
        return None
    value = getattr(attribute, which)
    return list(value.values) if which == "bool_list" else value


# --- A timeline as traces ---


def export(
    timeline: Timeline,
    folder: Path,
    slices: int = 4,
    detail: str = "operators",
    progress: Callable[[], None] = lambda: None,
) -> list[Path]:
    """Write ``<folder>/step.<rank>.et`` for every rank, and ``comm_group.json`` with the groups.

    detail : ``"operators"``, or ``"tasks"``: one node for the computation of a task, and one for
        its collectives of each kind and group.
    """
    groups: dict[tuple[int, ...], str] = {}
    firsts = _first_ranks(timeline)
    tasks = {
        rep: [task for task in timeline.tasks if rep in (task.rank, task.peer)] for rep in firsts
    }
    count = sum(
        timeline.replicas[rep] * sum(len(task.parts) for task in tasks[rep] if task.rank == rep)
        for rep in firsts
    )
    require(
        detail == "tasks" or count <= MOST_NODES,
        f"{count} operators in all ranks' traces",
        f"{MOST_NODES}",
        "pass --detail tasks",
    )
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in range(timeline.world_size):
        rep = _representative(rank, firsts)
        traced = _Rank(rank, rep, firsts, timeline.replicas[rep], groups, slices)
        path = folder / f"step.{rank}.et"
        with path.open("wb") as target:
            write_trace(target, traced.nodes(tasks[rep], detail))
        paths.append(path)
        progress()
    (folder / "comm_group.json").write_text(
        json.dumps({name: members for members, name in groups.items()}) + "\n", "utf-8"
    )
    return [*paths, folder / "comm_group.json"]


def _first_ranks(timeline: Timeline) -> dict[int, int]:
    """Representative -> its first rank."""
    firsts, first = {}, 0
    for rep, count in timeline.replicas.items():
        firsts[rep] = first
        first += count
    return firsts


def _representative(rank: int, firsts: dict[int, int]) -> int:
    return max((rep for rep in firsts if firsts[rep] <= rank), key=lambda rep: firsts[rep])


@dataclass
class _Rank:
    """Makes the nodes of one rank of a timeline; those of a stream wait for each other.

    rep : whose tasks this rank does. firsts : representative -> its first rank. ranks : how many do
    the same tasks. groups : members -> name, of all ranks so far. tail : stream -> its last node.
    """

    rank: int
    rep: int
    firsts: dict[int, int]
    ranks: int
    groups: dict[tuple[int, ...], str]
    slices: int
    count: int = 0
    tail: dict[str, int] = field(default_factory=dict)

    def nodes(self, tasks: list[Task], detail: str) -> Iterator[Node]:
        last_of: dict[int, int] = {}
        for task in tasks:
            after = [last_of[n] for n in task.after if n in last_of]
            if task.peer >= 0:
                node = self._message(task, after)
                last_of[task.number] = node.number
                yield node
                continue
            for part in _merged(task.parts) if detail == "tasks" else task.parts:
                for node in self._operator(task, part, after):
                    after = []
                    yield node
            if task.stream in self.tail:
                last_of[task.number] = self.tail[task.stream]

    def _message(self, task: Task, after: list[int]) -> Node:
        is_mine = task.rank == self.rep
        other = self.firsts[task.peer if is_mine else task.rank] + self._place
        source, target = (self.rank, other) if is_mine else (other, self.rank)
        attributes = {
            "comm_src": source,
            "comm_dst": target,
            "comm_tag": task.number,
            "comm_size": int(task.parts[0].nbytes),
        }
        if is_mine:
            return self._node(task, task.name, SEND, after, attributes)
        return self._node(task, task.name, RECV, [], attributes, stream=f"from {task.rank}")

    def _operator(self, task: Task, part: Part, after: list[int]) -> Iterator[Node]:
        is_fused = bool(part.collective) and part.compute > 0.0
        pieces = self.slices if is_fused else 1
        for piece in range(pieces):
            if part.compute > 0.0 or not part.collective:
                micros = max(round((part.compute or part.seconds) / pieces * 1e6), 1)
                yield self._node(task, part.name, COMP, after, {"num_ops": 0}, micros)
                after = []
            if part.collective in COLLECTIVES and part.ranks > 1:
                group = tuple(self._members(part))
                share = pieces * (part.ranks if part.collective == "all_gather" else 1)
                attributes = {
                    "comm_type": COLLECTIVES[part.collective],
                    "comm_size": max(int(part.nbytes / share), 1),
                    "pg_name": self.groups.setdefault(group, str(len(self.groups) + 1)),
                }
                name = f"{part.name} {part.collective} {piece}"
                is_tail = piece == pieces - 1  # meanwhile the next piece is computed
                yield self._node(task, name, COLL, after, attributes, is_tail=is_tail)
                after = []

    def _node(
        self,
        task: Task,
        name: str,
        kind: int,
        after: list[int],
        attributes: dict[str, Any],
        micros: int = 0,
        stream: str = "",
        is_tail: bool = True,
    ) -> Node:
        """The next node. The one after it in its stream waits for the last node ``is_tail``."""
        stream = stream or task.stream
        waits = [*after, self.tail[stream]] if stream in self.tail else after
        attributes = {"is_cpu_op": False, **attributes}
        node = Node(self.count, name, kind, waits, micros, int(task.begin * 1e6), attributes)
        self.count += 1
        if is_tail:
            self.tail[stream] = node.number
        return node

    @property
    def _place(self) -> int:
        return self.rank - self.firsts[self.rep]

    def _members(self, part: Part) -> list[int]:
        """The ranks of the group of a part. Tensor parallel ranks are consecutive, data parallel
        ranks are a tensor group apart."""
        first = self.firsts[self.rep]
        if part.axis == "dp":
            apart = self.ranks // part.ranks
            return [first + self._place % apart + apart * i for i in range(part.ranks)]
        begin = first + self._place // part.ranks * part.ranks
        return list(range(begin, begin + part.ranks))


def _merged(parts: tuple[Part, ...]) -> list[Part]:
    """The parts of a task as one computation and one collective of each kind and group."""
    found: dict[tuple[str, str, int], Part] = {}
    for part in parts:
        key = (part.collective, part.axis, part.ranks) if part.collective else ("", "", 1)
        old = found.get(key)
        found[key] = Part(
            part.collective or "compute",
            part.phase,
            part.seconds + (old.seconds if old else 0.0),
            part.exposed + (old.exposed if old else 0.0),
            part.collective,
            part.nbytes + (old.nbytes if old else 0.0),
            part.ranks,
            part.axis,
            part.compute + (old.compute if old else 0.0),
        )
    return list(found.values())
