"""Frozen dataclasses from JSON that anyone may have written: data, checked, never run."""

import dataclasses
import json
import math
import typing
from typing import Any

NOTHING = dataclasses.MISSING


def read_json(text: str) -> Any:
    """What JSON text holds.

    Raises:
      TypeError: if ``text`` is no string.
      ValueError: if it is not JSON, or is nested too deeply.
    """
    if not isinstance(text, str):
        raise TypeError(f"a plan must be JSON text, got {type(text).__name__}")
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"a plan must be JSON: {error}") from error


def read(kind: Any, value: Any, where: str) -> Any:
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
            raise ValueError(
                f"{where} must have {len(arguments)} entries, got {value!r}"
            )
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


def read_fields(kind: Any, value: Any, where: str) -> Any:
    """A dataclass from an object with its fields; those with a default may be missing."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {value!r}")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    missing = sorted(n for n in set(fields) - set(value) if fields[n] is NOTHING)
    if missing or set(value) - set(fields):
        raise ValueError(
            f"{where} must have the fields of {kind.__name__}: missing {missing}, "
            f"unknown {sorted(set(value) - set(fields))}"
        )
    return kind(**{n: read(hints[n], x, f"{where}.{n}") for n, x in value.items()})
