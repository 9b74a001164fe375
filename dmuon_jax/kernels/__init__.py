"""Batched products for Newton-Schulz, each with an XLA and, on GPUs, Pallas versions."""

from dmuon_jax.kernels.api import (
    direct_chain,
    gram,
    matmul,
    polynomial_chain,
    symmetric_matmul,
)

__all__ = [
    "direct_chain",
    "gram",
    "matmul",
    "polynomial_chain",
    "symmetric_matmul",
]
