"""What a plan costs beside AdamW: memory, and time of the update of its matrices.

Arithmetic on a device's rates, nothing measured. Embeddings, norms and whatever else goes
to Adam in both cases are left out of both.
"""

import dataclasses
import itertools
import math

from dmuon_jax.planning.devices import Device
from dmuon_jax.planning.plan import Plan
from dmuon_jax.planning.report import ITEMSIZE

ADAMW_PASSES = 7
"""float32 arrays that AdamW reads (gradient, both moments, parameter) and writes (both
moments, parameter)."""

MUON_PASSES = 5
"""Likewise for Muon outside the owners' work: gradient and momentum read, momentum
written; parameter read and written. The blocks that travel come on top."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Figures of one device and one step.

    Attributes:
      muon_state_bytes: momentum of the plan's matrices.
      adamw_state_bytes: both moments that AdamW would hold for them.
      whole_bytes: whole matrices that an owner holds at a time, in float32.
      adamw_us: AdamW's update of the plan's matrices, limited by memory bandwidth.
      passes_us: memory-bound passes of the Muon update outside the owners' work.
      orthogonalize_us: the busiest owner's Newton-Schulz.
      exchange_us: the exchange, if nothing hid it.
    """

    muon_state_bytes: int
    adamw_state_bytes: int
    whole_bytes: int
    adamw_us: float
    passes_us: float
    orthogonalize_us: float
    exchange_us: float

    @property
    def hidden_us(self) -> float:
        """The Muon update if the exchange hides behind other work."""
        return self.passes_us + self.orthogonalize_us

    @property
    def exposed_us(self) -> float:
        """The Muon update if nothing hides the exchange."""
        return self.hidden_us + self.exchange_us


def estimate(plan: Plan, device: Device) -> Estimate:
    """Estimates ``plan`` on ``device``; momentum and parameters are float32."""
    stored, updated, blocks = 0, 0, 0.0
    for group in plan.groups:
        for index in group.leaves:
            leaf = plan.leaves[index]
            size = math.prod(leaf.shape)
            here_in = size // plan.mesh.size(sum(leaf.spec_in, ()))
            here_out = size // plan.mesh.size(sum(leaf.spec_out, ()))
            stored += here_in
            updated += here_out
            blocks += (here_in + here_out) * ITEMSIZE[group.exchange_dtype]
    passes = 4 * (MUON_PASSES - 2) * stored + 4 * 2 * updated + blocks
    return Estimate(
        muon_state_bytes=4 * stored,
        adamw_state_bytes=8 * updated,
        whole_bytes=whole_bytes(plan),
        adamw_us=device.stream_us(4 * ADAMW_PASSES * updated),
        passes_us=device.stream_us(passes),
        orthogonalize_us=plan.makespan_us,
        exchange_us=plan.exchange_us,
    )


def whole_bytes(plan: Plan) -> int:
    """float32 bytes of an owner's slots; with waves, of two that follow one another."""
    held = held_by_wave(plan)
    if len(held) == 1:
        return held[0]
    return max(sum(pair) for pair in itertools.pairwise(held))


def held_by_wave(plan: Plan) -> list[int]:
    """float32 bytes of the slots of each wave on an owner, EMPTY ones included."""
    held = [0] * plan.num_waves
    for group in plan.groups:
        parcel = math.prod(plan.group_layout(group).parcel_shape)
        for part in group.parts:
            held[part.wave] += 4 * part.slots * parcel
    return held
