"""YAML documents whose errors have line, field, and what is allowed.

A document is read by a :class:`Record`, which has a reader for each field. Readers are functions
from a YAML node to a value. They raise :class:`~tileweave.errors.InputError` with file and line
through :func:`fail`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tileweave.errors import InputError

Reader = Callable[["Spot"], Any]
REQUIRED = object()


@dataclass(frozen=True)
class Spot:
    """A YAML node and its path from the root of the file. Without ``file`` it is a value from
    elsewhere."""

    file: str
    path: str
    node: yaml.Node

    def inside(self, name: str, node: yaml.Node) -> Spot:
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


def text_of(path: Path) -> str:
    """The contents of a text file."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"asked: {path}: {error}; allowed: text in UTF-8; remedy: check which file it is"
        ) from None


def open_document(path: Path) -> Spot:
    """The root of a YAML file."""
    if not path.is_file():
        raise InputError(
            f"asked: file {path}; allowed: a YAML file that exists; remedy: check the path"
        )
    return parse_document(text_of(path), str(path))


def parse_document(text: str, name: str) -> Spot:
    """The root of YAML in memory; ``name`` is used for the file in messages."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
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


def _scalar(spot: Spot, allowed: str) -> Any:
    if not isinstance(spot.node, yaml.ScalarNode):
        kind = "a list" if isinstance(spot.node, yaml.SequenceNode) else "a mapping"
        raise fail(spot, kind, allowed, "write one value")
    return yaml.safe_load(yaml.serialize(spot.node))


def number(low: float, high: float, unit: str = "") -> Reader:
    """A number in [low, high]; also ``1e-6`` without a dot, which is text in YAML 1.1."""
    allowed = f"a number from {low:g} to {high:g}{' ' + unit if unit else ''}"

    def read(spot: Spot) -> float:
        value = _scalar(spot, allowed)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise fail(spot, repr(value), allowed, "write a number") from None
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not low <= value <= high
        ):
            raise fail(spot, repr(value), allowed, "write a number in that range")
        return float(value)

    return read


def integer(low: int, high: int, unit: str = "") -> Reader:
    """An integer in [low, high]."""
    allowed = f"a whole number from {low} to {high}{' ' + unit if unit else ''}"

    def read(spot: Spot) -> int:
        value = _scalar(spot, allowed)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise fail(spot, repr(value), allowed, "write a whole number in that range")
        return value

    return read


def text(spot: Spot) -> str:
    """Any text."""
    value = _scalar(spot, "text")
    if not isinstance(value, str):
        raise fail(spot, repr(value), "text", "put it in quotes")
    return value


def flag(spot: Spot) -> bool:
    """true or false."""
    value = _scalar(spot, "true or false")
    if not isinstance(value, bool):
        raise fail(spot, repr(value), "true or false", "write one of these")
    return value


def choice(options: tuple[str, ...]) -> Reader:
    """One of some words; the error suggests a similar one."""

    def read(spot: Spot) -> str:
        value = str(_scalar(spot, ", ".join(options)))
        if value not in options:
            near = difflib.get_close_matches(value, options, 1)
            raise fail(
                spot,
                repr(value),
                ", ".join(options),
                f"did you mean {near[0]!r}?" if near else "write one of these",
            )
        return value

    return read


def items(reader: Reader) -> Reader:
    """A list, each item read by ``reader``."""

    def read(spot: Spot) -> tuple[Any, ...]:
        if not isinstance(spot.node, yaml.SequenceNode):
            raise fail(spot, "no list", "a list: [a, b, c]", "put it in brackets")
        return tuple(reader(spot.inside(str(i), node)) for i, node in enumerate(spot.node.value))

    return read


def either(scalar: Reader, compound: Reader) -> Reader:
    """``scalar`` for a single value, ``compound`` for a mapping or a list."""
    return lambda spot: scalar(spot) if isinstance(spot.node, yaml.ScalarNode) else compound(spot)


@dataclass(frozen=True)
class Record:
    """A mapping with named fields: name -> (reader, default). ``REQUIRED`` fields have no default.

    ``make`` gets all fields; its errors get the position of the mapping.
    """

    fields: Mapping[str, tuple[Reader, Any]]
    make: Callable[..., Any] = dict

    def __call__(self, spot: Spot) -> Any:
        names = ", ".join(self.fields)
        if not isinstance(spot.node, yaml.MappingNode):
            raise fail(spot, "no mapping", f"a mapping with {names}", "write `name: value` lines")
        found: dict[str, Any] = {}
        for key_node, node in spot.node.value:
            name = str(key_node.value)
            here = spot.inside(name, key_node)
            if name not in self.fields:
                near = difflib.get_close_matches(name, list(self.fields), 1)
                raise fail(
                    here,
                    f"field {name!r}",
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


def checked(values: Mapping[str, Any], fields: Mapping[str, tuple[Reader, Any]]) -> dict[str, Any]:
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
        return {
            str(key.value): reader(spot.inside(str(key.value), node))
            for key, node in spot.node.value
        }

    return read
