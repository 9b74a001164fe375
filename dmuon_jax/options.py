"""What ``dmuon`` takes beyond ``optax.contrib.muon``, checked at construction."""

import dataclasses
from typing import Any

import jax

from dmuon_jax.kernels.select import check_implementation
from dmuon_jax.matrices import Axes
from dmuon_jax.memory import check_kinds
from dmuon_jax.planning.plan import Plan
from dmuon_jax.planning.problem import Method
from dmuon_jax.shardings import given_shardings


@dataclasses.dataclass(frozen=True)
class OwnerOptions:
    """What ``dmuon`` takes beyond ``optax.contrib.muon``; see there."""

    plan: Plan | None = None
    param_shardings: Any = None
    momentum_shardings: Any = None
    compute_dtype: Any = None
    exchange_dtype: Any = None
    method: Method | None = None
    implementation: str | None = None
    owner_axes: Axes | None = None
    max_wave_bytes: int | None = None

    def __post_init__(self):
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise TypeError(f"plan must be a Plan, got {type(self.plan).__name__}")
        if self.method not in (None, "direct", "gram"):
            raise ValueError(
                f"method must be None, 'direct' or 'gram', got {self.method!r}"
            )
        check_implementation(self.implementation)
        if self.max_wave_bytes is not None and self.max_wave_bytes < 1:
            raise ValueError(f"max_wave_bytes must be positive, got {self.max_wave_bytes}")
        check_kinds(given_shardings(self.momentum_shardings))
        dtype_name("compute_dtype", self.compute_dtype)
        dtype_name("exchange_dtype", self.exchange_dtype)


def dtype_name(name: str, dtype: Any) -> str | None:
    """The name of a real floating dtype, or None for None.

    Raises:
      ValueError: if it is not one.
    """
    if dtype is None:
        return None
    allowed = ("float16", "bfloat16", "float32", "float64")
    try:
        found = jax.dtypes.canonicalize_dtype(dtype).name
    except TypeError as error:
        raise ValueError(f"{name} must be one of {allowed}, got {dtype!r}") from error
    if found not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {found!r}")
    return found
