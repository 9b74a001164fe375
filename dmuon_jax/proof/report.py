"""An audit as text."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmuon_jax.proof.audit import Audit

MIB = 2**20
ROWS = 12


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Columns of equal width; the first is text, the others are figures."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def purpose(op_name: str) -> str:
    """The last parts of a JAX path, enough to recognise a layer or a bucket."""
    return "/".join(op_name.split("/")[-3:])[-44:] or "-"


def collective_rows(audit: Audit) -> list[tuple[str, ...]]:
    """One row per kind, group, mode, place and purpose, most bytes first."""
    sums: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0, 0, 0, 0.0])
    waits = {}
    if audit.timeline is not None:
        for event in audit.timeline.events:
            waits[event.name] = event.exposed_us * event.times
    for item in audit.collectives:
        mode = "async" if item.asynchronous else "sync"
        place = "loop" if item.in_loop else "branch" if item.in_branch else ""
        key = (item.kind, purpose(item.op_name), str(item.group_size), mode, place)
        entry = sums[key]
        entry[0] += 1
        entry[1] += item.times
        entry[2] += item.run_bytes
        entry[3] += waits.get(item.name, 0.0)
    ordered = sorted(sums.items(), key=lambda pair: (-pair[1][2], pair[0]))
    rows = [
        (*key, f"{n:.0f}", f"{runs:.0f}", f"{size / MIB:.2f}", f"{wait:.1f}")
        for key, (n, runs, size, wait) in ordered
    ]
    if len(rows) > ROWS:
        rest = [value for _, value in ordered[ROWS:]]
        n, runs, size, wait = (sum(column) for column in zip(*rest, strict=True))
        more = (f"{len(rest)} more rows", "", "", "", "")
        rows = rows[:ROWS]
        rows.append(
            (*more, f"{n:.0f}", f"{runs:.0f}", f"{size / MIB:.2f}", f"{wait:.1f}")
        )
    head = (
        "collective",
        "for",
        "group",
        "mode",
        "in",
        "count",
        "runs",
        "MiB",
        "wait us",
    )
    return [head, *rows]


def fact_rows(audit: Audit) -> list[tuple[str, ...]]:
    """Totals of an audit, one fact a row."""
    rows = [
        ("devices", f"{audit.num_devices}"),
        ("collectives", f"{len(audit.collectives)}"),
        ("of them in loops", f"{len(audit.collectives_in_loops)}"),
        ("of them synchronous", f"{len(audit.synchronous)}"),
        ("collective MiB / device", f"{audit.collective_bytes / MIB:.2f}"),
        ("matmul GFLOP / device", f"{audit.dot_flops / 1e9:.3f}"),
    ]
    if audit.redundancy is not None:
        rows.append(("redundancy", f"{audit.redundancy:.3f}"))
    if audit.bytes_ratio is not None:
        rows.append(("bytes over the plan's", f"{audit.bytes_ratio:.3f}"))
    if audit.peak_bytes is not None:
        rows.append(("peak memory MiB / device", f"{audit.peak_bytes / MIB:.1f}"))
    if audit.timeline is not None:
        rows += [
            (
                f"model step ms on {audit.timeline.device}",
                f"{audit.timeline.step_us / 1e3:.3f}",
            ),
            ("exposed communication ms", f"{audit.timeline.exposed_us / 1e3:.3f}"),
        ]
        if audit.plan_bytes is not None:
            wait_us = audit.timeline.imbalance_us
            rows.append(("waits for other devices ms", f"{wait_us / 1e3:z.3f}"))
    return rows


def table(audit: Audit) -> str:
    """Facts, collectives and what could not be counted, as plain text."""
    parts = [f"audit of {audit.name}", aligned(fact_rows(audit))]
    if audit.collectives:
        parts.append(aligned(collective_rows(audit)))
    for item in audit.flops.conditionals:
        branches = ", ".join(f"{flops / 1e9:.3f}" for flops in item.branches)
        parts.append(f"conditional {item.name}: branches of {branches} GFLOP")
    if audit.flops.unknown_loops:
        names = ", ".join(audit.flops.unknown_loops)
        parts.append(f"loops of unknown length, counted once: {names}")
    if audit.flops.unknown_kernels:
        names = ", ".join(audit.flops.unknown_kernels)
        parts.append(f"kernels of unknown FLOPs, counted as none: {names}")
    return "\n\n".join(parts)
