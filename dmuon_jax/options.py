"""What ``dmuon`` takes beyond ``optax.contrib.muon``, checked at construction."""

import dataclasses
import numbers
from typing import Any, Literal

from dmuon_jax.costs import Costs, check_costs
from dmuon_jax.dtypes import dtype_name
from dmuon_jax.kernels.select import check_implementation
from dmuon_jax.matrices import Axes
from dmuon_jax.memory import check_kinds
from dmuon_jax.planning.compare import AUTO
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
    owner_axes: Axes | Literal["auto"] | None = None
    max_wave_bytes: int | None = None
    max_owner_bytes: int | None = None
    costs: Costs = None

    def __post_init__(self):
        if self.plan is not None and not isinstance(self.plan, Plan):
            raise TypeError(f"plan must be a Plan, got {type(self.plan).__name__}")
        if self.method not in (None, "direct", "gram"):
            raise ValueError(
                f"method must be None, 'direct' or 'gram', got {self.method!r}"
            )
        check_implementation(self.implementation)
        for name in ("max_wave_bytes", "max_owner_bytes"):
            limit = vars(self)[name]
            if limit is None:
                continue
            if isinstance(limit, bool) or not isinstance(limit, numbers.Integral):
                raise TypeError(f"{name} must be a whole number of bytes, got {limit!r}")
            if limit < 1:
                raise ValueError(f"{name} must be positive, got {limit}")
        if isinstance(self.owner_axes, str) and self.owner_axes != AUTO:
            raise ValueError(
                f"owner_axes must be None, 'auto' or a tuple of axes, got "
                f"{self.owner_axes!r}"
            )
        axes = () if self.owner_axes in (None, AUTO) else tuple(self.owner_axes)
        if len(set(axes)) < len(axes):
            raise ValueError(f"owner_axes must name each axis once, got {axes}")
        check_costs(self.costs)
        if self.plan is not None and self.costs is not None:
            raise ValueError(
                "costs must be None with plan=, which was made with its own, got "
                f"{self.costs!r}"
            )
        check_kinds(given_shardings(self.momentum_shardings))
        dtype_name("compute_dtype", self.compute_dtype)
        dtype_name("exchange_dtype", self.exchange_dtype)


def owner_options(caller: str, **given: Any) -> OwnerOptions:
    """``given`` as options.

    Raises:
      TypeError: ``caller`` does not take one of them.
    """
    known = [field.name for field in dataclasses.fields(OwnerOptions)]
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(f"the options of {caller} must be among {known}, got {unknown}")
    return OwnerOptions(**given)
