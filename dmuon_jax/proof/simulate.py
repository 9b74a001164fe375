"""Training steps of public models on clusters that are not there, by optimizer.

Each step is compiled for the cluster and put on the clock of the two-stream model.
Layers are a scan, so the whole model is compiled.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from dmuon_jax.proof.audit import Audit, audit
from dmuon_jax.proof.models import Model
from dmuon_jax.proof.report import aligned
from dmuon_jax.proof.steps import Cluster, compile_step
from dmuon_jax.proof.timeline import Timeline
from dmuon_jax.proof.topology import compile_devices

EXCHANGE_SCOPES = ("to_owners", "from_owners")


@dataclasses.dataclass(frozen=True)
class Run:
    """One optimizer's step: CPU seconds it took to compile, and what it does."""

    optimizer: str
    compile_s: float
    audit: Audit

    @property
    def timeline(self) -> Timeline:
        """The step on the clock of the device that ``simulate`` audits for."""
        if self.audit.timeline is None:
            raise ValueError(f"the audit of {self.optimizer} must have a device")
        return self.audit.timeline

    def exchange_us(self) -> dict[str, float]:
        """What the all-to-alls and gathers of owners take, and what of it is exposed."""
        events = [
            event
            for event in self.timeline.events
            if event.lane == "communication"
            and any(scope in event.op_name for scope in EXCHANGE_SCOPES)
        ]
        return {
            "total": sum(event.duration_us * event.times for event in events),
            "exposed": sum(event.exposed_us * event.times for event in events),
        }

    def split_us(self) -> dict[str, float]:
        """Step time by what the devices that compute most in branches spend it on."""
        events = self.timeline.events
        compute = [event for event in events if event.lane == "compute"]
        matmul = sum(e.duration_us * e.times for e in compute if e.flops)
        memory = sum(e.duration_us * e.times for e in compute if not e.flops)
        return {
            "matmul": matmul,
            "memory": memory,
            "exposed": self.timeline.exposed_us,
            "imbalance": self.timeline.imbalance_us,
        }


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Steps of one model on one cluster, one per optimizer.

    Attributes:
      model: name of the workload.
      mesh: sizes of the mesh axes.
      device: name of the device.
      sequence: tokens of a sequence.
      batch_per_device: sequences on one device.
      clip: whether gradients are clipped by their global norm.
      runs: in the order of the optimizers.
    """

    model: str
    mesh: tuple[tuple[str, int], ...]
    device: str
    sequence: int
    batch_per_device: int
    clip: bool
    runs: tuple[Run, ...]

    def ratio(self, run: Run) -> float:
        """Step time over that of the first optimizer."""
        return run.timeline.step_us / self.runs[0].timeline.step_us

    def summary(self) -> str:
        """A table with one row per optimizer."""
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh)
        head = (
            f"{self.model} on {self.device} ({mesh}), {self.batch_per_device} x "
            f"{self.sequence} tokens per device, "
            f"{'with' if self.clip else 'without'} clipping by global norm, all layers "
            "as a scan; times are the two-stream model's"
        )
        first = self.runs[0].split_us()
        rows = [
            (
                "optimizer",
                "step ms",
                "ratio",
                "exposed ms",
                "GiB",
                "compile CPU s",
                "adds most",
            )
        ]
        for run in self.runs:
            peak = run.audit.peak_bytes
            added = {key: us - first[key] for key, us in run.split_us().items()}
            most = max(added, key=lambda key: added[key])
            limit = f"{most} +{added[most] / 1e3:.2f} ms" if added[most] > 0 else "-"
            rows.append(
                (
                    run.optimizer,
                    f"{run.timeline.step_us / 1e3:.2f}",
                    f"{self.ratio(run):.3f}",
                    f"{run.timeline.exposed_us / 1e3:.2f}",
                    "-" if peak is None else f"{peak / 2**30:.1f}",
                    f"{run.compile_s:.1f}",
                    limit,
                )
            )
        return f"{head}\n\n{aligned(rows)}"

    def to_json(self) -> str:
        """All figures as JSON text."""
        record = dataclasses.asdict(dataclasses.replace(self, runs=()))
        record["mesh"] = dict(self.mesh)
        record["runs"] = [
            {
                "optimizer": run.optimizer,
                "step_us": run.audit.step_us,
                "ratio": self.ratio(run),
                "split_us": run.split_us(),
                "exchange_us": run.exchange_us(),
                "peak_bytes": run.audit.peak_bytes,
                "dot_flops": run.audit.dot_flops,
                "collectives": len(run.audit.collectives),
                "collective_bytes": run.audit.collective_bytes,
                "compile_s": run.compile_s,
            }
            for run in self.runs
        ]
        return json.dumps(record, indent=1)


def simulate(
    model: Model,
    mesh_axes: Mapping[str, int],
    device: str,
    *,
    sequence: int = 4096,
    batch_per_device: int = 1,
    optimizers: Sequence[str] = ("adamw", "muon", "dmuon"),
    clip: bool = True,
) -> Simulation:
    """Compile and audit a training step for each optimizer.

    Args:
      model: from `model_named`.
      mesh_axes: sizes of mesh axes in order, the last within a node. The batch is
        split over all, parameters over "fsdp".
      device: entry of `DEVICES` to compile for.
      sequence: tokens of a sequence.
      batch_per_device: sequences on one device.
      optimizers: adamw, muon (optax's) and dmuon; ratios are to the first.
      clip: whether to clip gradients by their global norm.

    Raises:
      ValueError: a parameter does not divide, or the devices make no whole nodes.
      NotImplementedError: the plugin to compile for `device` is missing.
    """
    sizes = tuple(mesh_axes.values())
    count = math.prod(sizes)
    devices = np.array(compile_devices(device, count)).reshape(sizes)
    cluster = Cluster(Mesh(devices, tuple(mesh_axes)), device)
    runs = []
    for name in optimizers:
        tokens = (batch_per_device * count, sequence)
        step = compile_step(model, cluster, name, tokens, clip)
        found = audit(step.compiled, plan=step.plan, device=device)
        runs.append(Run(name, step.compile_s, found))
    return Simulation(
        model=model.name,
        mesh=tuple(mesh_axes.items()),
        device=device,
        sequence=sequence,
        batch_per_device=batch_per_device,
        clip=clip,
        runs=tuple(runs),
    )
