"""What a process started by ``tests.processes`` does: ``python -m tests.worker``."""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import signal
import sys
import threading
import warnings
from unittest import mock

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dmuon_jax.measure
from dmuon_jax import (
    Measured,
    agreement,
    dmuon,
    leaves,
    plan_owners,
    state_shardings,
)
from dmuon_jax.find_plan import PlanFinder
from dmuon_jax.options import OwnerOptions
from dmuon_jax.planning.devices import device_of_kind
from dmuon_jax.routing import matrices_of

SHAPES = {"rows": (16, 12), "columns": (10, 16), "whole": (14, 10), "bias": (16,)}
SPECS = {"rows": P("x"), "columns": P(None, "x"), "whole": P(), "bias": P("x")}


def values(seed):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


def spread(tree, shardings):
    """Host values as arrays of all processes."""

    def one(x, sharding):
        return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

    return jax.tree.map(one, tree, shardings)


def make_step(tx, in_step=None):
    """A jitted step; each process calls ``in_step`` while it runs."""

    def call(x):
        jax.debug.callback(in_step)
        return x

    @jax.jit
    def step(params, state, grads):
        if in_step is not None:
            mesh = jax.typeof(grads["bias"]).sharding.mesh
            mapped = jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
            grads["bias"] = mapped(grads["bias"])
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


class Run:
    """Training on all devices of all processes, with a checkpoint after each step."""

    def __init__(self, store: pathlib.Path, in_step=None):
        mesh = Mesh(np.array(jax.devices()), ("x",))
        self.shardings = {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()}
        self.tx = dmuon(0.05, weight_decay=0.1, ns_steps=2)
        self.params = spread(values(0), self.shardings)
        self.state = self.tx.init(self.params)
        self.plan = plan_owners(self.params)
        self.step = make_step(self.tx, in_step)
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
        self.manager = ocp.CheckpointManager(store, options=options)
        self.done = 0

    def resume(self) -> None:
        """Continues the newest checkpoint, if there is one."""
        self.done = self.manager.latest_step() or 0
        if self.done:
            tx = dmuon(0.05, param_shardings=self.shardings)
            where = state_shardings(tx, self.params, self.plan)
            like = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                (self.params, self.state),
                (self.shardings, where),
            )
            arguments = ocp.args.StandardRestore(like)
            self.params, self.state = self.manager.restore(self.done, args=arguments)

    def advance(self) -> None:
        self.done += 1
        grads = spread(values(self.done), self.shardings)
        self.params, self.state = self.step(self.params, self.state, grads)

    def save(self) -> None:
        tree = (self.params, self.state)
        self.manager.save(self.done, args=ocp.args.StandardSave(tree))

    def lowered(self) -> str:
        grads = spread(values(0), self.shardings)
        return self.step.lower(self.params, self.state, grads).as_text()


def train(setup) -> dict:
    """Trains from the newest checkpoint to step ``stop``; may die on the way."""
    doomed = setup["index"] == setup["count"] - 1

    def die():
        if doomed and run.done == setup["die_in_step"]:
            os.kill(os.getpid(), signal.SIGKILL)

    run = Run(pathlib.Path(setup["store"]), die if "die_in_step" in setup else None)
    run.resume()
    start = run.done
    while run.done < setup["stop"]:
        run.advance()
        if run.done == setup.get("die_in_save"):
            die_when_saving(pathlib.Path(setup["store"]))
        run.save()
    if setup["index"] == 0:
        np.savez(setup["result"], **gathered(run))
    else:
        gathered(run)
    text = hashlib.sha256(run.lowered().encode()).hexdigest()
    return {"start": start, "plan": run.plan.digest(), "lowered": text}


def gathered(run: Run) -> dict:
    """Every array of parameters and state, whole, by path."""
    items = jax.tree_util.tree_leaves_with_path((run.params, run.state))
    replicated = NamedSharding(run.shardings["bias"].mesh, P())
    whole = jax.jit(lambda x: x, out_shardings=replicated)
    return {
        jax.tree_util.keystr(path): np.asarray(whole(x).addressable_data(0))
        for path, x in items
    }


def die_when_saving(store: pathlib.Path) -> None:
    """Kills this process as soon as an unfinished checkpoint lies in ``store``."""

    def watch():
        while not any("tmp" in name for name in os.listdir(store)):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


ODD = {
    "versions": "versions of dmuon_jax or jax",
    "parameters": "parameters",
    "costs": "costs or options",
    "options": "costs or options",
    "plan": "owners",
}
"""What the last process may have otherwise, and how the others are told."""


def disagree(setup) -> dict:
    """Inits where the last process has something else; the last time, uncaught."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    shardings = {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()}
    params = spread(values(0), shardings)
    told = {}
    for kind in ODD:
        try:
            init_oddly(kind if setup["index"] == setup["count"] - 1 else "", kind, params)
        except ValueError as error:
            told[kind] = str(error)
    print(json.dumps(told), flush=True)
    init_oddly("options" if setup["index"] else "", "", params)
    return {}


def init_oddly(own: str, kind: str, params) -> None:
    """``dmuon.init``, with something of ``own`` kind that the other processes lack."""
    options, patches = {}, []
    if own == "versions":
        patches.append(mock.patch.object(agreement, "versions", lambda: "newer"))
    if own == "parameters":
        params = {k: x for k, x in params.items() if k != "whole"}
    if own == "costs":
        patches.append(mock.patch.object(leaves, "device_of_kind", slower_device))
    if own == "options":
        options["method"] = "gram"
    if kind == "plan":
        axes = () if own else None
        options["plan"] = plan_owners(params, owner_axes=axes)
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        dmuon(0.05, **options).init(params)


def slower_device(platform, kind):
    return dataclasses.replace(device_of_kind(platform, kind), name="a slower one")


def measure(setup) -> dict:
    """Inits with measured costs, which differ between processes or cannot be had."""
    timed, how, index = [], setup["how"], setup["index"]

    def time_update_us(point, path, device):
        timed.append(point)
        if how == "fail":
            raise jax.errors.JaxRuntimeError("INTERNAL: a kernel failed")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if (index == 0) == (point.method == "gram"):
            return 2.0 * point.batch
        return 900.0 * point.batch

    dmuon_jax.measure.time_update_us = time_update_us
    costs = Measured(cache=setup["cache"])
    if how == "odd" and index:
        costs = "roofline"
    mesh = Mesh(np.array(jax.devices()), ("x",))
    shardings = {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()}
    params = spread(values(0), shardings)
    finder = PlanFinder(OwnerOptions(costs=costs))
    plan = finder.find(*matrices_of(params, None), at_init=True).plan
    (table,) = finder.tables.values()
    try:
        plan_owners(params, costs=costs)
    except ValueError as error:
        refused = str(error)
    return {
        "timed": len(timed),
        "plan": plan.digest(),
        "table": table.to_json(),
        "refused": refused,
    }


def main(task: str, setup: dict) -> None:
    warnings.simplefilter("error", DeprecationWarning)
    if setup["count"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            setup["address"],
            setup["count"],
            setup["index"],
            initialization_timeout=60,
            heartbeat_timeout_seconds=10,
        )
    tasks = {"train": train, "disagree": disagree, "measure": measure}
    result = tasks[task](setup)
    print(json.dumps(result), flush=True)
    if setup["count"] > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
