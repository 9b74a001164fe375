"""Gradient accumulation: ``optax.MultiSteps`` around ``dmuon``.

The iteration runs on the mean gradient, once for every few batches. Inside the transform
(averaging orthogonalized gradients) it would be another, worse optimizer.
"""

import jax
import optax
from jax.sharding import Mesh
from toy import batches, by_rows, init_params, train, use_virtual_devices

from dmuon_jax import dmuon, place_state


def main(steps: int = 40, every: int = 4) -> list[float]:
    """Trains; returns the losses of all batches."""
    mesh = Mesh(jax.devices(), ("fsdp",))
    params = jax.device_put(init_params(), by_rows(init_params(), mesh))
    tx = optax.MultiSteps(dmuon(0.02), every_k_schedule=every)
    # MultiSteps' own counters are put on the mesh too, or the step compiles twice.
    state = place_state(tx.init(params), mesh, params)

    return train(tx, params, state, batches(steps))[2]


if __name__ == "__main__":
    use_virtual_devices()
    print(main())
