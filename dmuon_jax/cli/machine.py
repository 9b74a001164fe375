"""The devices of this machine, or one sentence where JAX finds none."""

from typing import Any

import jax


def find_devices() -> list[Any]:
    """All devices.

    Raises:
      NotImplementedError: JAX finds none, with its reason.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        # An assertion is what fails where a platform is named and its plugin is missing.
        config: Any = jax.config
        reason = str(error).splitlines()[0] if str(error) else "its plugin is missing"
        raise NotImplementedError(
            f"a device must be found, got none with JAX_PLATFORMS="
            f"{config.jax_platforms or ''}: {reason}"
        ) from error
