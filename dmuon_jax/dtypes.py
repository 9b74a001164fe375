"""Names of dtypes."""

from typing import Any

import jax


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
