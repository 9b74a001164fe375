"""Coefficients (a, b, c) of the quintic Newton-Schulz step, by author.

One step maps each singular value x to ``a x + b x^3 + c x^5``.
"""

import numbers

import numpy as np

from dmuon_jax.polar_express import polar_express

# Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024
# (https://kellerjordan.github.io/posts/muon/): one triple for every step.
JORDAN = (3.4445, -4.7750, 2.0315)

# Jiacheng You's five-step schedule, as used by Ahn et al., "Dion: Distributed
# Orthonormalized Updates" (arXiv 2504.05295) and by optax under the name "dion".
YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

PRESETS = {"jordan": JORDAN, "you": YOU, "standard": JORDAN, "dion": YOU}
"""Names that ``ns_coeffs`` takes: ours by author, and optax's names for the same."""

GENERATED = ("polar_express",)
"""Names of tables that are made for the number of steps, see ``polar_express``."""


def resolve_coefficients(ns_coeffs, ns_steps):
    """The triple or table that ``ns_coeffs`` stands for.

    Args:
      ns_coeffs: a preset name, a triple, or a table of triples.
      ns_steps: number of steps; a table must not have more rows.

    Returns:
      The triple, or the table as a tuple of triples.

    Raises:
      ValueError: unknown name, wrong shape, more rows than ``ns_steps``, or a generated
        table for a number of steps that is not known when it is made.
    """
    if isinstance(ns_coeffs, str):
        ns_coeffs = preset(ns_coeffs, ns_steps)
    shape = np.shape(ns_coeffs)
    if len(shape) not in (1, 2) or shape[-1] != 3 or 0 in shape:
        raise ValueError(f"ns_coeffs must have shape (3,) or (n, 3), got {shape}")
    if len(shape) == 2 and isinstance(ns_steps, numbers.Integral):
        if shape[0] > ns_steps:
            raise ValueError(
                f"ns_coeffs must have at most ns_steps={ns_steps} rows, got {shape[0]}"
            )
    return ns_coeffs


def preset(name, ns_steps):
    """The triple or table called ``name``."""
    if name in PRESETS:
        return PRESETS[name]
    if name not in GENERATED:
        raise ValueError(
            "ns_coeffs must be a triple, a table or one of "
            f"{sorted((*PRESETS, *GENERATED))}, got {name!r}"
        )
    if not isinstance(ns_steps, numbers.Integral):
        raise ValueError(
            f"ns_steps must be a plain integer with ns_coeffs={name!r}, got {ns_steps!r}; "
            "pass the table polar_express(steps) instead"
        )
    return polar_express(int(ns_steps))
