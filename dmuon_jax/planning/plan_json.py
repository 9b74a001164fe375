"""Frozen dataclasses from JSON that anyone may have written: data, checked, never run."""

import dataclasses
import json
import math
import typing
from typing import Any, TypeVar

Read = TypeVar("Read")


def read_json(text: str) -> Any:
    """What JSON text holds.

    Raises:
      ValueError: if it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"a plan must be JSON: {error}") from error


def read(kind: type[Read], value: Any, where: str) -> Read:
    """``value``, as JSON holds it, as an instance of ``kind``.

    Args:
      kind: int, float, str, bool, a ``Literal``, a tuple type or a dataclass of such.
      value: what ``json.loads`` gave.
      where: names the value in errors.

    Raises:
      ValueError: if something is missing, unknown or of another kind, with its place.
    """
    if dataclasses.is_dataclass(kind):
        return read_fields(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {value!r}")
        if arguments[-1] is Ellipsis:
            arguments = arguments[:1] * len(value)
        if len(value) != len(arguments):
            raise ValueError(f"{where} must have {len(arguments)} entries, got {value!r}")
        items = zip(arguments, value, strict=True)
        return tuple(read(t, x, f"{where}[{i}]") for i, (t, x) in enumerate(items))
    if origin is typing.Literal:
        if value not in arguments or not isinstance(value, str):
            raise ValueError(f"{where} must be one of {arguments}, got {value!r}")
        return value
    if type(value) is int and abs(value) >= 2**53:
        raise ValueError(f"{where} must be below 2^53, got {value}")
    value = float(value) if kind is float and type(value) is int else value
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise ValueError(f"{where} must be of type {kind.__name__}, got {value!r}")
    return value


def read_fields(kind: type[Read], value: Any, where: str) -> Read:
    """A dataclass from an object with exactly its fields."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {value!r}")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    if set(value) != set(names):
        raise ValueError(
            f"{where} must have the fields of {kind.__name__}: missing "
            f"{sorted(set(names) - set(value))}, unknown {sorted(set(value) - set(names))}"
        )
    return kind(**{n: read(hints[n], value[n], f"{where}.{n}") for n in names})
