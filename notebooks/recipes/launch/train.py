"""One program for many hosts: started once per process by ``slurm.sh`` or ``ssh.sh``.

python train.py                                                    # one process
python train.py --coordinator host0:1234 --processes 2 --process 0 # by hand
srun python train.py --slurm                                       # under SLURM
"""

import argparse
import pathlib
import sys

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmuon_jax import dmuon

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from toy import batches, by_rows, init_params, loss  # noqa: E402


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--coordinator", help="address:port of process 0")
    add("--processes", type=int, help="how many there are")
    add("--process", type=int, help="number of this one, from 0")
    add("--slurm", action="store_true", help="read all three from SLURM's environment")
    add("--cpu-devices", type=int, help="virtual devices per process, to try it out")
    add("--steps", type=int, default=20)
    add("--checkpoint", type=pathlib.Path, help="continue from it, and write it")
    return parser.parse_args()


def connect(arguments: argparse.Namespace) -> None:
    """Joins the other processes; must come before the first use of a device."""
    if arguments.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.cpu_devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if arguments.slurm:
        jax.distributed.initialize()
    elif arguments.coordinator:
        jax.distributed.initialize(
            arguments.coordinator, arguments.processes, arguments.process
        )


def place(tree, mesh: Mesh):
    """The same values on every process, matrices cut by rows."""

    def one(x, sharding):
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(one, tree, by_rows(tree, mesh))


def each_collective(mesh: Mesh):
    """A jitted function of rows with one all-to-all, one all-gather and one all-reduce."""
    columns = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda x: (x, x, x.sum()), out_shardings=(columns, whole, whole))


def warm_up(mesh: Mesh) -> None:
    """Opens the connections now, so that the first step is not the one that waits."""
    ones = place({"x": np.ones((mesh.size, mesh.size), np.float32)}, mesh)["x"]
    jax.block_until_ready(each_collective(mesh)(ones))
    multihost_utils.sync_global_devices("ready")


def main() -> None:
    """Trains; process 0 prints."""
    arguments = parse()
    connect(arguments)
    mesh = Mesh(jax.devices(), ("fsdp",))  # all processes' devices, one node's together
    warm_up(mesh)
    params = place(init_params(), mesh)
    tx = dmuon(0.02)
    state = tx.init(params)

    @jax.jit
    def train_step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    with ocp.StandardCheckpointer() as checkpointer:
        done = 0
        if arguments.checkpoint and arguments.checkpoint.exists():
            like = {"params": params, "state": state, "step": 0}
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            found = checkpointer.restore(arguments.checkpoint.absolute(), like)
            params, state, done = found["params"], found["state"], found["step"]
        for x, y in list(batches(arguments.steps))[done:]:
            batch = (np.asarray(x), np.asarray(y))  # the same on all processes here
            params, state, value = train_step(params, state, *batch)
            if jax.process_index() == 0:
                print(f"loss {float(value):.6f}", flush=True)
        if arguments.checkpoint:
            saved = {"params": params, "state": state, "step": arguments.steps}
            checkpointer.save(arguments.checkpoint.absolute(), saved, force=True)


if __name__ == "__main__":
    main()
