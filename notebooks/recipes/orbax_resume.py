"""Orbax: save on one mesh, continue on another. A plan is only a schedule, so the
checkpoint knows nothing of owners and restores on any mesh."""

import pathlib
import tempfile

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from toy import batches, by_rows, init_params, train, use_virtual_devices

from dmuon_jax import dmuon


def start(mesh: Mesh, axes):
    """A transform, parameters and state on a mesh."""
    tx = dmuon(0.02)
    params = jax.device_put(init_params(), by_rows(init_params(), mesh, axes))
    return tx, params, tx.init(params)


def main(steps: int = 20) -> list[float]:
    """Trains half on one mesh and half on another; returns the losses."""
    devices = np.array(jax.devices())
    data = list(batches(steps))
    tx, params, state = start(Mesh(devices, ("fsdp",)), "fsdp")
    params, state, first = train(tx, params, state, data[: steps // 2])

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "checkpoint"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, {"params": params, "state": state})
            checkpointer.wait_until_finished()
            # Elsewhere, later: half the devices, two axes, rows over both.
            half = devices[: len(devices) // 2].reshape(2, -1)
            tx, params, state = start(Mesh(half, ("data", "fsdp")), ("data", "fsdp"))
            like = jax.tree.map(
                ocp.utils.to_shape_dtype_struct, {"params": params, "state": state}
            )
            found = checkpointer.restore(path, like)
    _, _, second = train(tx, found["params"], found["state"], data[steps // 2 :])
    return first + second


if __name__ == "__main__":
    use_virtual_devices()
    print(main())
