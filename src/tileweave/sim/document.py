"""YAML documents whose errors have line, field, and what is allowed.

A document is read by a :class:`Record`, which has a reader for each field. Readers are functions
from a YAML node to a value. They raise :class:`~tileweave.errors.InputError` with file and line
through :func:`fail`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from tileweave.errors import InputError
from tileweave.files import read_text, short

Reader = Callable[["Spot"], Any]
REQUIRED = object()
Fields = Mapping[str, tuple[Reader, Any]]  # name -> (reader, default, or REQUIRED)
_MOST = 1 << 24  # bytes of a file, which takes seconds for each megabyte
DEEPEST = 50  # mappings and lists inside each other
_LONGEST = 60  # characters of a value that a message repeats
_PLAIN = ("str", "int", "float", "bool", "null", "timestamp")


@dataclass(frozen=True)
class Spot:
    """A YAML node and its path from the root of the file. Without ``file`` it is a value from
    elsewhere."""

    file: str
    path: str
    node: yaml.Node

    def inside(self, name: str, node: yaml.Node) -> Spot:
        name = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."
        return Spot(self.file, f"{self.path}.{name}" if self.path else name, node)


def fail(spot: Spot, asked: str, allowed: str, remedy: str) -> InputError:
    """The error for a position in a file."""
    return InputError(f"{_place(spot)}: asked: {asked}; allowed: {allowed}; remedy: {remedy}")


def _place(spot: Spot) -> str:
    return (
        f"{spot.file}, line {spot.node.start_mark.line + 1}, field {spot.path or '(top)'}"
        if spot.file
        else spot.path
    )


def located(spot: Spot, error: InputError) -> InputError:
    """An error of fields that are valid alone but not together, with the position of the field that
    it begins with, in the file of ``spot``."""
    said = str(error)
    if not said.startswith("asked: "):
        return error
    first = re.match(r"asked: (\w+)", said)
    pairs = spot.node.value if isinstance(spot.node, yaml.MappingNode) else []
    for key, node in pairs:
        if first and key.value == first[1]:
            return InputError(f"{_place(spot.inside(str(key.value), node))}: {said}")
    return InputError(f"{spot.file}: {said}")


def open_document(path: Path) -> Spot:
    """The root of a YAML file."""
    text = read_text(path, "file", "a YAML file that exists, in UTF-8", "check the path", _MOST)
    return parse_document(text, short(path))


def parse_document(text: str, name: str) -> Spot:
    """The root of YAML in memory; ``name`` is used for the file in messages."""
    try:
        _require_shallow(text, name)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        if error.context == "while scanning a simple key":  # found where the next line begins
            mark = error.context_mark
        line = mark.line + 1 if mark else 0
        raise InputError(
            f"{name}, line {line}: asked: {error.problem}; allowed: YAML; "
            "remedy: check indentation, colons and quotes there"
        ) from None
    except yaml.reader.ReaderError as error:  # has a position in characters, not in lines
        line = text.count("\n", 0, error.position) + 1
        asked = f"character #x{error.character:04x}, which YAML does not allow"
        raise InputError(
            f"{name}, line {line}: asked: {asked}; allowed: YAML; remedy: remove it"
        ) from None
    if node is None:
        raise InputError(
            f"{name}, line 1: asked: an empty file; allowed: a mapping; "
            "remedy: see docs/simulator.md"
        )
    return Spot(name, "", node)


def _require_shallow(text: str, name: str) -> None:
    """Refuse what is nested so deep that composing it would exhaust Python's stack."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            depth += 1
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            depth -= 1
        if depth > DEEPEST:
            raise InputError(
                f"{name}, line {event.start_mark.line + 1}: asked: {depth} mappings or lists "
                f"inside each other; allowed: at most {DEEPEST}; remedy: see docs/simulator.md"
            )


def _scalar(spot: Spot, allowed: str) -> Any:
    node = spot.node
    if not isinstance(node, yaml.ScalarNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
        raise fail(spot, kind, allowed, "write one value")
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind not in _PLAIN:
        raise fail(spot, f"a value with tag {shown(node.tag)}", allowed, "leave the tag out")
    if kind in ("int", "float") and ":" in node.value:  # 1:30 is 90 in YAML 1.1
        return node.value
    try:
        return yaml.SafeLoader("").construct_document(node)
    except (yaml.YAMLError, ValueError, OverflowError, LookupError, AttributeError):
        raise fail(spot, shown(node.value), allowed, "write a value of that kind") from None


def shown(value: object) -> str:
    """A value as messages repeat it: not all of a long one."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _name_of(spot: Spot, key: yaml.Node) -> str:
    """The name of a field."""
    if not isinstance(key, yaml.ScalarNode):
        raise fail(
            spot.inside("?", key), "a key that is a list or a mapping", "a name", "remove it"
        )
    return str(key.value)


def number(low: float, high: float, unit: str = "") -> Reader:
    """A number in [low, high]; also ``1e-6`` without a dot, which is text in YAML 1.1."""
    allowed = f"a number from {low:g} to {high:g}{' ' + unit if unit else ''}"

    def read(spot: Spot) -> float:
        value = _scalar(spot, allowed)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise fail(spot, shown(value), allowed, "write a number") from None
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not low <= value <= high
        ):
            raise fail(spot, shown(value), allowed, "write a number in that range")
        return float(value)

    return read


def integer(low: int, high: int, unit: str = "") -> Reader:
    """An integer in [low, high]."""
    allowed = f"a whole number from {low} to {high}{' ' + unit if unit else ''}"

    def read(spot: Spot) -> int:
        value = _scalar(spot, allowed)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise fail(spot, shown(value), allowed, "write a whole number in that range")
        return value

    return read


def text(spot: Spot) -> str:
    """Any text."""
    value = _scalar(spot, "text")
    if not isinstance(value, str):
        raise fail(spot, shown(value), "text", "put it in quotes")
    return value


def flag(spot: Spot) -> bool:
    """true or false."""
    value = _scalar(spot, "true or false")
    if not isinstance(value, bool):
        raise fail(spot, shown(value), "true or false", "write one of these")
    return value


def choice(options: tuple[str, ...]) -> Reader:
    """One of some words; the error suggests a similar one."""

    def read(spot: Spot) -> str:
        value = str(_scalar(spot, ", ".join(options)))
        if value not in options:
            near = difflib.get_close_matches(value, options, 1)
            raise fail(
                spot,
                shown(value),
                ", ".join(options),
                f"did you mean {near[0]!r}?" if near else "write one of these",
            )
        return value

    return read


def items(reader: Reader, most: int = 1000) -> Reader:
    """A list of at most ``most`` items, each read by ``reader``."""

    def read(spot: Spot) -> tuple[Any, ...]:
        if not isinstance(spot.node, yaml.SequenceNode):
            raise fail(spot, "no list", "a list: [a, b, c]", "put it in brackets")
        count = len(spot.node.value)
        if count > most:
            raise fail(spot, f"{count} items", f"at most {most}", "write fewer")
        return tuple(reader(spot.inside(str(i), node)) for i, node in enumerate(spot.node.value))

    return read


def either(scalar: Reader, compound: Reader) -> Reader:
    """``scalar`` for a single value, ``compound`` for a mapping or a list."""
    return lambda spot: scalar(spot) if isinstance(spot.node, yaml.ScalarNode) else compound(spot)


@dataclass(frozen=True)
class Record:
    """A mapping with named fields.

    ``make`` gets all fields; its errors get the position of the mapping.
    """

    fields: Fields
    make: Callable[..., Any] = dict

    def __call__(self, spot: Spot) -> Any:
        names = ", ".join(self.fields)
        if not isinstance(spot.node, yaml.MappingNode):
            raise fail(spot, "no mapping", f"a mapping with {names}", "write `name: value` lines")
        found: dict[str, Any] = {}
        for key_node, node in spot.node.value:
            name = _name_of(spot, key_node)
            here = spot.inside(name, key_node)
            if name not in self.fields:
                near = difflib.get_close_matches(name, list(self.fields), 1)
                raise fail(
                    here,
                    f"field {shown(name)}",
                    names,
                    f"did you mean {near[0]!r}?" if near else "remove it",
                )
            if name in found:
                raise fail(here, f"field {name!r} twice", "once", "remove one")
            found[name] = self.fields[name][0](spot.inside(name, node))
        for name, (_, default) in self.fields.items():
            if name not in found:
                if default is REQUIRED:
                    raise fail(
                        spot,
                        f"no field {name!r}",
                        f"it is required, with {names}",
                        f"add `{name}: ...`",
                    )
                found[name] = default
        try:
            return self.make(**found)
        except InputError as error:  # fields that are valid alone but not together
            raise InputError(f"{_place(spot)}: {error}") from None


def fields_of(record: type, /, **readers: Reader) -> Fields:
    """The fields of a dataclass that a document may have, with the defaults of the dataclass."""
    defaults = {
        one.name: REQUIRED if one.default is MISSING else one.default for one in fields(record)
    }
    return {name: (reader, defaults[name]) for name, reader in readers.items()}


def checked(values: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """Values from elsewhere (a command line, a program), read like the fields of a file."""
    return {
        name: fields[name][0](Spot("", name, yaml.compose(yaml.safe_dump(value))))
        for name, value in values.items()
    }


def mapping_of(reader: Reader) -> Reader:
    """A mapping with any names, each value read by ``reader``."""

    def read(spot: Spot) -> dict[str, Any]:
        if not isinstance(spot.node, yaml.MappingNode):
            raise fail(spot, "no mapping", "a mapping of names", "write `name: value` lines")
        named = [(_name_of(spot, key), node) for key, node in spot.node.value]
        return {name: reader(spot.inside(name, node)) for name, node in named}

    return read
