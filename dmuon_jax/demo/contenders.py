"""The optimizers that the demo compares, as data."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from dmuon_jax import Plan, dmuon
from dmuon_jax.demo.model import muon_dimension_numbers

LABELS = ("AdamW", "optax.contrib.muon", "dmuon")
WARMUP_STEPS = 10
WEIGHT_DECAY = 0.1
# consistent_rms gives Muon's updates about AdamW's size
# (https://arxiv.org/abs/2502.16982), so that one rate serves Muon's matrices and the
# Adam that updates the rest.
MUON_ARGUMENTS: dict[str, Any] = dict(
    weight_decay=WEIGHT_DECAY,
    consistent_rms=0.2,
    muon_weight_dimension_numbers=muon_dimension_numbers,
)
# The best of 1e-3, 2e-3, 4e-3 and 8e-3 for each, by held-out loss after 40 steps with
# seed 1: AdamW 2.814, 2.789, 3.050, 3.116; Muon 2.764, 2.706, 2.682, 2.709.
ADAMW_RATE = 2e-3
MUON_RATE = 4e-3


@dataclasses.dataclass(frozen=True)
class Contender:
    """An optimizer to train with.

    Attributes:
      label: Its name in the table, the plot and the checkpoints' folder.
      peak_rate: Learning rate after the warm-up.
      make: Learning-rate schedule in, optimizer out.
    """

    label: str
    peak_rate: float
    make: Callable[[optax.Schedule], optax.GradientTransformation]

    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer: a short warm-up, then a constant rate.

        The rate does not depend on how many steps are planned, so a run that is resumed
        for more steps continues the one that stopped.
        """
        peak = self.peak_rate
        return self.make(optax.linear_schedule(peak / WARMUP_STEPS, peak, WARMUP_STEPS))


def contenders(plan: Plan) -> tuple[Contender, ...]:
    """AdamW, optax's Muon and dmuon, with the rates they were tuned to.

    Args:
      plan: Who orthogonalizes what; dmuon would make the same by itself, but the demo
        shows it.
    """
    return (
        Contender(
            LABELS[0],
            ADAMW_RATE,
            lambda rate: optax.adamw(rate, weight_decay=WEIGHT_DECAY),
        ),
        Contender(
            LABELS[1],
            MUON_RATE,
            lambda rate: optax.contrib.muon(rate, **MUON_ARGUMENTS),
        ),
        Contender(
            LABELS[2],
            MUON_RATE,
            lambda rate: dmuon(rate, plan=plan, **MUON_ARGUMENTS),
        ),
    )
