"""Flax NNX: ``nnx.Optimizer`` takes ``dmuon`` as it takes any optax transform."""

import jax
from flax import nnx
from jax.sharding import Mesh
from toy import HIDDEN, WIDTH, batches, by_rows, use_virtual_devices

from dmuon_jax import dmuon


class Network(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.up(x)))


def shard(model: nnx.Module, mesh: Mesh) -> None:
    """FSDP: kernels are cut by rows."""
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.device_put(state, by_rows(state, mesh)))


@nnx.jit
def train_step(model, optimizer, x, y):
    """One step in place."""

    def loss(model):
        return ((model(x) - y) ** 2).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def main(steps: int = 20) -> list[float]:
    """Trains; returns the losses."""
    mesh = Mesh(jax.devices(), ("fsdp",))
    model = Network(nnx.Rngs(0))
    shard(model, mesh)  # before the optimizer, which reads the shardings
    optimizer = nnx.Optimizer(model, dmuon(0.02), wrt=nnx.Param)
    return [float(train_step(model, optimizer, x, y)) for x, y in batches(steps)]


if __name__ == "__main__":
    use_virtual_devices()
    print(main())
