"""Limits on an audit, and the error that names what breaks them."""

from __future__ import annotations

from dmuon_jax.proof.collective import Collective


class AuditError(AssertionError):
    """A compiled program does something that `Audit.check` forbids."""


def over_count(name: str, found: tuple[Collective, ...], most: int | None) -> list[str]:
    """Lines of a failure where more than `most` were found."""
    if most is None or len(found) <= most:
        return []
    shown = [f"  {item}" for item in found[:10]]
    return [f"{name} must be at most {most}, got {len(found)}:", *shown]


def over_ratio(
    name: str, value: float | None, most: float | None, offenders: tuple[object, ...]
) -> list[str]:
    """Lines of a failure where `value` is above `most`."""
    if most is None:
        return []
    if value is None:
        needed = {"redundancy": "ideal_flops or plan", "bytes_ratio": "plan"}
        given = needed.get(name, "device")
        raise ValueError(f"{name} needs an audit that was given {given}")
    if value <= most:
        return []
    shown = [f"  {item}" for item in offenders[:10]]
    return [f"{name} must be at most {most}, got {value:.4g}:", *shown]
