"""A running ``optax.contrib.muon`` job goes on with ``dmuon``, from the same state.

The state has the same structure, so nothing is converted; with ``method="direct"`` the
losses go on as they would have, up to rounding. The way back works too.
"""

import jax
import optax
from jax.sharding import Mesh
from toy import batches, by_rows, init_params, train, use_virtual_devices

from dmuon_jax import dmuon


def main(steps: int = 20) -> list[float]:
    """Trains half with each; returns the losses."""
    mesh = Mesh(jax.devices(), ("fsdp",))
    params = jax.device_put(init_params(), by_rows(init_params(), mesh))
    data = list(batches(steps))
    old = optax.contrib.muon(0.02, weight_decay=0.01)
    params, state, first = train(old, params, old.init(params), data[: steps // 2])

    new = dmuon(0.02, weight_decay=0.01)
    fresh = new.init(params)  # reads the shardings, and says where the state belongs
    state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, fresh)
    _, _, second = train(new, params, state, data[steps // 2 :])
    return first + second


if __name__ == "__main__":
    use_virtual_devices()
    print(main())
