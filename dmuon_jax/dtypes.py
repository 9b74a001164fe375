"""Names of dtypes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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


def moment_dtype(name: str, dtype: Any) -> np.dtype | None:
    """A dtype, real or complex, that can hold a moment; None for None.

    Raises:
      ValueError: if it is not one.
    """
    if dtype is None:
        return None
    rule = f"{name} must be None or a floating dtype"
    try:
        found = jax.dtypes.canonicalize_dtype(dtype)
    except TypeError as error:
        raise ValueError(f"{rule}, got {dtype!r}") from error
    if not jnp.issubdtype(found, np.inexact):
        raise ValueError(f"{rule}, got {found.name!r}")
    return found
