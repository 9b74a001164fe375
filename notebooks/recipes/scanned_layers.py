"""MaxText style: layers stacked in one leaf, axes named logically, rules for the mesh.

``hidden_matrices`` finds out which axis counts layers and leaves the embedding to Adam.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from toy import HIDDEN, WIDTH, batches, train, use_virtual_devices

from dmuon_jax import dmuon, hidden_matrices, plan_owners

LAYERS = 4
# What each dimension of a parameter is called, and what the mesh does with the name.
LOGICAL_AXES = {
    "embedder": {"embedding": ("input", "embed")},
    "layers": {
        "mlp": {
            "wi": {"kernel": ("layers", "embed", "mlp")},
            "wo": {"kernel": ("layers", "mlp", "embed")},
        },
        "norm": {"scale": ("layers", "norm")},
    },
}
SIZES = {"input": WIDTH, "embed": WIDTH, "mlp": HIDDEN, "layers": LAYERS, "norm": WIDTH}
RULES = {"embed": "fsdp", "mlp": "tensor"}  # all other names are replicated


def is_axes(x) -> bool:
    """Whether a node of LOGICAL_AXES is a leaf."""
    return isinstance(x, tuple)


def init_params(mesh: Mesh):
    """Every parameter, sharded by the rules."""

    def one(axes):
        scale = 1.0 if axes[-1] == "norm" else SIZES[axes[-2]] ** -0.5
        shape = tuple(SIZES[name] for name in axes)
        value = jax.random.normal(jax.random.key(len(axes[-1])), shape) * scale
        spec = PartitionSpec(*(RULES.get(name) for name in axes))
        return jax.device_put(value, NamedSharding(mesh, spec))

    return jax.tree.map(one, LOGICAL_AXES, is_leaf=is_axes)


def loss(params, x, y):
    """Mean squared error of a residual network whose layers are a scan."""

    def layer(x, weights):
        hidden = jnp.tanh(
            (x * weights["norm"]["scale"]) @ weights["mlp"]["wi"]["kernel"]
        )
        return x + hidden @ weights["mlp"]["wo"]["kernel"], None

    x, _ = jax.lax.scan(layer, x @ params["embedder"]["embedding"], params["layers"])
    return jnp.mean((x - y) ** 2)


def main(steps: int = 20) -> list[float]:
    """Trains; returns the losses."""
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("fsdp", "tensor"))
    params = init_params(mesh)
    plan = plan_owners(params, muon_weight_dimension_numbers=hidden_matrices)
    tx = dmuon(0.01, muon_weight_dimension_numbers=hidden_matrices, plan=plan)
    state = tx.init(params)

    return train(tx, params, state, batches(steps), loss)[2]


if __name__ == "__main__":
    use_virtual_devices()
    print(main())
