"""A training step of a model on a cluster, compiled.

The step: fp32 master weights, gathered in bf16 layer by layer (FSDP), every layer
computed again in the backward pass, gradients reduced in bf16, clipping by global norm,
the optimizer, donated buffers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmuon_jax.find_plan import plan_owners
from dmuon_jax.muon import dmuon
from dmuon_jax.planning.plan import Plan
from dmuon_jax.proof.models import (
    Model,
    Sharded,
    is_matrix,
    loss_function,
    parameter_shapes,
)
from dmuon_jax.proof.topology import GPU_TARGETS

OPTIMIZERS = ("adamw", "muon", "dmuon", "dmuon-local")
SHARD_AXES = ("fsdp", "expert")
# Channels of a head that cuDNN's fused attention takes on every GPU.
MOST_CHANNELS = 128
# What users of large clusters set, the same for every optimizer; and no search for tiles,
# which gives the same program where there is no device to search on, but takes longer.
GPU_OPTIONS: dict[str, Any] = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step, the plan of its dmuon, and the CPU seconds it took, all threads."""

    compiled: jax.stages.Compiled
    plan: Plan | None
    compile_s: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The mesh to compile for, and the kind of its devices."""

    mesh: Mesh
    device: str

    @property
    def batch(self) -> NamedSharding:
        """The first dimension over all axes."""
        return self.place(tuple(self.mesh.axis_names))

    def place(self, *spec: Any) -> NamedSharding:
        """A sharding on the mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def parameter(self, shape: tuple[int, ...], path: str) -> NamedSharding:
        """Split the second to last dimension, or the last where that does not divide.

        Stacks of experts are split into experts over the axis "expert" first.
        """
        spec: list[Any] = [None] * len(shape)
        axes = [axis for axis in SHARD_AXES if axis in self.mesh.shape]
        if path.startswith("experts_") and "expert" in axes:
            spec[-3] = "expert"
            axes.remove("expert")
        shards = math.prod(self.mesh.shape[axis] for axis in axes)
        wanted = [len(shape) - 1] if path.endswith(("norm", "embedding")) else []
        wanted += [d for d in (len(shape) - 2, len(shape) - 1) if d >= 0]
        for dim in wanted:
            if axes and shape[dim] % shards == 0:
                spec[dim] = axes[0] if len(axes) == 1 else tuple(axes)
                return self.place(*spec)
        if shards > 1 and not path.endswith("norm"):
            raise ValueError(
                f"a dimension of {shape} must divide by {shards} (at {path})"
            )
        return self.place(*spec)

    def gathered(self, shape: tuple[int, ...], path: str) -> NamedSharding:
        """Where a weight is whole, but for the experts that other devices have."""
        if path.startswith("experts_") and "expert" in self.mesh.shape:
            return self.place(*[None] * (len(shape) - 3), "expert")
        return self.place()


def gather_for(cluster: Cluster) -> Callable[[jax.Array, str], jax.Array]:
    """Cast to bf16, then gather; the gradient is reduced in bf16, then cast."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def gather(weight: jax.Array, role: str) -> jax.Array:
        narrow = weight.astype(jnp.bfloat16)
        whole = cluster.gathered(weight.shape, role)
        return jax.lax.with_sharding_constraint(narrow, whole)

    def forward(weight: jax.Array, role: str) -> tuple[jax.Array, None]:
        return gather(weight, role), None

    def backward(role: str, _: None, grad: jax.Array) -> tuple[jax.Array]:
        spec = cluster.parameter(grad.shape, role)
        return (jax.lax.with_sharding_constraint(grad, spec).astype(jnp.float32),)

    gather.defvjp(forward, backward)
    return gather  # pyright: ignore[reportReturnType]  # custom_vjp hides its types


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, kernel: Literal["xla", "cudnn"]
) -> jax.Array:
    """Causal attention of [batch, token, head, channel].

    Without a GPU at hand JAX cannot know that it has cuDNN's kernel for wide heads. They
    run as several narrow ones, which multiply as much.
    """
    pieces = -(-q.shape[-1] // MOST_CHANNELS)
    cut = [x.reshape(*x.shape[:2], x.shape[2] * pieces, -1) for x in (q, k, v)]
    mixed = jax.nn.dot_product_attention(*cut, is_causal=True, implementation=kernel)
    return mixed.reshape(v.shape[:2] + q.shape[2:])


def sharded_for(cluster: Cluster) -> Sharded:
    """FSDP on the cluster, with cuDNN's fused attention where it compiles."""
    axes = cluster.mesh.axis_names
    split = tuple(axis for axis in axes if axis in SHARD_AXES)
    rest = tuple(axis for axis in axes if axis not in SHARD_AXES)
    like_table = cluster.place(rest or None, None, split or None)
    others = tuple(axis for axis in axes if axis != "expert")
    expert = "expert" if "expert" in axes else None
    at_experts = cluster.place(others or None, expert)
    constrain = jax.lax.with_sharding_constraint
    return Sharded(
        gather=gather_for(cluster),
        pin=functools.partial(constrain, shardings=cluster.batch),
        spread=functools.partial(constrain, shardings=like_table),
        attend=functools.partial(
            attend, kernel="cudnn" if cluster.device in GPU_TARGETS else "xla"
        ),
        to_experts=functools.partial(constrain, shardings=at_experts),
        to_tokens=functools.partial(constrain, shardings=cluster.batch),
    )


def dimension_numbers(params: Any) -> Any:
    """Muon's rule: stacked matrices of the towers, nothing else."""
    return {
        tower: {
            role: optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)
            if is_matrix(tower, role)
            else None
            for role, leaf in leaves.items()
        }
        for tower, leaves in params.items()
    }


def plan_for(name: str, params: Any, cluster: Cluster) -> Plan | None:
    """The plan of the transform called `name`, None for those that have no owners."""
    if name not in ("dmuon", "dmuon-local"):
        return None
    narrow = jnp.float16 if cluster.device in GPU_TARGETS else jnp.bfloat16
    half = jnp.float32 if cluster.device == "cpu" else narrow
    sharding = tuple(axis for axis in SHARD_AXES if axis in cluster.mesh.shape)
    return plan_owners(
        params,
        muon_weight_dimension_numbers=dimension_numbers,
        param_shardings=jax.tree.map(lambda leaf: leaf.sharding, params),
        compute_dtype=half,
        exchange_dtype=half,
        owner_axes=None if name == "dmuon" else sharding,
    )


def optimizer_named(name: str, shardings: Any, plan: Plan | None) -> Any:
    """The transform called `name`.

    Args:
      name: adamw, muon (optax's), dmuon, or dmuon-local: its owners are spread over the
        axes that shard parameters, and replicas repeat the work.
      shardings: of the parameters.
      plan: of dmuon.
    """
    rate, decay = 3e-4, 0.1
    if name == "adamw":
        return optax.adamw(rate, weight_decay=decay)
    if name == "muon":
        return optax.contrib.muon(
            rate,
            weight_decay=decay,
            muon_weight_dimension_numbers=dimension_numbers,
        )
    if name in ("dmuon", "dmuon-local"):
        return dmuon(
            rate,
            weight_decay=decay,
            muon_weight_dimension_numbers=dimension_numbers,
            param_shardings=shardings,
            plan=plan,
        )
    raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")


def placed_state(state: Any, params: Any, cluster: Cluster) -> Any:
    """Shapes of an optimizer's state: moments as their parameter, scalars replicated."""
    paths = {
        tuple(str(key) for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }

    def place(path: Sequence[Any], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        tail = tuple(str(key) for key in path[-2:])
        like = paths.get(tail)
        sharding = cluster.place()
        if like is not None and like.shape == leaf.shape:
            sharding = like.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, state)


def compile_step(
    model: Model, cluster: Cluster, optimizer: str, tokens: tuple[int, int], clip: bool
) -> Step:
    """The step of `model` with the transform called `optimizer`, compiled."""
    started = time.process_time()
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=cluster.parameter(leaf.shape, str(path[-1].key)),
        ),
        parameter_shapes(model),
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    plan = plan_for(optimizer, params, cluster)
    transform = optimizer_named(optimizer, shardings, plan)
    if clip:
        transform = optax.chain(optax.clip_by_global_norm(1.0), transform)
    loss = loss_function(model, sharded_for(cluster))

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads = jax.lax.with_sharding_constraint(grads, shardings)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = placed_state(jax.eval_shape(transform.init, params), params, cluster)
    batch = jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=cluster.batch)
    outputs = (shardings, jax.tree.map(lambda x: x.sharding, state), cluster.place())
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=outputs)
    options = GPU_OPTIONS if cluster.device in GPU_TARGETS else None
    with jax.sharding.use_abstract_mesh(cluster.mesh.abstract_mesh):
        compiled = jitted.lower(params, state, batch).compile(compiler_options=options)
    return Step(compiled, plan, time.process_time() - started)
