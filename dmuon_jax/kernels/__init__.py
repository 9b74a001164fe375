"""Batched products for Newton-Schulz: an XLA version of each, and Pallas on GPUs."""

from dmuon_jax.kernels.api import (
    direct_chain,
    gram,
    matmul,
    pad_multiple,
    polynomial_chain,
    symmetric_matmul,
)
from dmuon_jax.kernels.pallas_common import pad_matrices
from dmuon_jax.kernels.select import Choice, Problem, Verdicts, choose

__all__ = [
    "Choice",
    "Problem",
    "Verdicts",
    "choose",
    "direct_chain",
    "gram",
    "matmul",
    "pad_matrices",
    "pad_multiple",
    "polynomial_chain",
    "symmetric_matmul",
]
