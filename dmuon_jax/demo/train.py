"""One training run: the shared problem, the contenders and the loop."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmuon_jax.demo import checkpoint, text
from dmuon_jax.demo.contenders import Contender
from dmuon_jax.demo.model import Gpt, ModelConfig

AXIS = "fsdp"
MAX_NORM = 1.0
EVALUATION_BATCHES = 4  # As many training batches' worth of held-out windows.


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run depends on; two runs with equal settings compute the same losses.

    Attributes:
      model: Sizes of the model.
      batch_size: Sequences per step; a multiple of the number of devices.
      seed: Initial weights and batches.
      evaluate_every: Steps between evaluations on held-out text.
    """

    model: ModelConfig
    batch_size: int
    seed: int
    evaluate_every: int = 10


@dataclasses.dataclass(frozen=True)
class Problem:
    """What all contenders share: text, initial parameters and compiled gradients.

    Attributes:
      settings: What the rest was made from.
      corpus: The text.
      mesh: Devices along the one axis ``"fsdp"``.
      params: Initial parameters, a nested dict, sharded ``P("fsdp")``.
      gradient: Compiled ``(params, tokens) -> (loss, clipped gradients)``.
      evaluate: Compiled ``(params, tokens) -> loss``.
    """

    settings: Settings
    corpus: text.Corpus
    mesh: Mesh
    params: Any
    gradient: Callable[[Any, jax.Array], tuple[jax.Array, Any]]
    evaluate: Callable[[Any, jax.Array], jax.Array]

    def batch(self, step: int) -> jax.Array:
        """Training windows of a step: ``[batch_size, length + 1]``, over the mesh."""
        return self._draw(self.corpus.train, step, self.settings.batch_size)

    def held_out_batch(self) -> jax.Array:
        """The held-out windows every evaluation uses."""
        size = EVALUATION_BATCHES * self.settings.batch_size
        return self._draw(self.corpus.held_out, 0, size)

    def _draw(self, data: np.ndarray, step: int, size: int) -> jax.Array:
        window = self.settings.model.length + 1
        tokens = text.draw_batch(data, self.settings.seed, step, size, window)
        return jax.device_put(tokens, NamedSharding(self.mesh, PartitionSpec(AXIS)))


@dataclasses.dataclass
class Run:
    """A contender's training so far.

    Attributes:
      contender: Who trains.
      update: Compiled ``(grads, state, params) -> (params, state)``.
      params: Parameters now.
      state: Optimizer state now.
      losses: Training loss of every step, before its update.
      held_out: ``(steps done, loss)`` of every evaluation.
      tokens_per_s: Of this session's steps; None before the first.
    """

    contender: Contender
    update: jax.stages.Compiled
    params: Any
    state: Any
    losses: list[float]
    held_out: list[tuple[int, float]]
    tokens_per_s: float | None = None


def make_problem(settings: Settings, corpus: text.Corpus, mesh: Mesh) -> Problem:
    """Draws the initial weights and compiles the gradients that all share."""
    graph, variables = nnx.split(Gpt(settings.model, nnx.Rngs(settings.seed)))
    params = nnx.to_pure_dict(variables)
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda leaf: fsdp_sharding(leaf, mesh), params)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        # FSDP: weights are whole only while the forward and backward passes use them.
        params = jax.lax.with_sharding_constraint(params, replicated)
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    def gradient(params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        clip = optax.clip_by_global_norm(MAX_NORM)
        return value, clip.update(grads, clip.init(params))[0]

    params = jax.device_put(params, shardings)
    window = settings.model.length + 1
    tokens = jax.ShapeDtypeStruct(
        (settings.batch_size, window),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec(AXIS)),
    )
    many = tokens.update(shape=(EVALUATION_BATCHES * settings.batch_size, window))
    jitted_gradient = jax.jit(gradient, out_shardings=(replicated, shardings))
    jitted_loss = jax.jit(loss, out_shardings=replicated)
    return Problem(
        settings=settings,
        corpus=corpus,
        mesh=mesh,
        params=params,
        gradient=jitted_gradient.lower(params, tokens).compile(),
        evaluate=jitted_loss.lower(params, many).compile(),
    )


def fsdp_sharding(leaf: jax.Array, mesh: Mesh) -> NamedSharding:
    """First axis over all devices where it divides, else replicated."""
    is_divisible = leaf.ndim > 0 and leaf.shape[0] % mesh.size == 0
    return NamedSharding(mesh, PartitionSpec(AXIS) if is_divisible else PartitionSpec())


def start(problem: Problem, contender: Contender) -> Run:
    """Initialises a contender and compiles its update, the optimizer and nothing else.

    Nothing is donated, so that the very program that trains can be timed afterwards on
    the same arrays.
    """
    tx = contender.optimizer()
    params = problem.params
    replicated = NamedSharding(problem.mesh, PartitionSpec())
    # optax makes counters and coefficients on one device; they belong on the mesh.
    state = jax.tree.map(
        lambda leaf: (
            leaf
            if leaf.sharding.device_set == replicated.device_set
            else jax.device_put(leaf, replicated)
        ),
        tx.init(params),
    )

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    jitted = jax.jit(update, out_shardings=shardings)
    compiled = jitted.lower(params, state, params).compile()
    return Run(contender, compiled, params, state, losses=[], held_out=[])


def train(
    problem: Problem,
    run: Run,
    steps: int,
    store: checkpoint.Store,
    show: Callable[[int, float, float], None],
) -> None:
    """Trains until ``steps`` steps are done, counted from the very first.

    Args:
      problem: What to train on.
      run: Where to continue; changed in place.
      steps: Steps to have done in the end.
      store: Where checkpoints go.
      show: Called after each step with steps done, loss and tokens per second.
    """
    settings = problem.settings
    held_out_batch = problem.held_out_batch()
    tokens = settings.batch_size * settings.model.length
    seconds = []
    for step in range(len(run.losses), steps):
        began = time.perf_counter()
        loss, grads = problem.gradient(run.params, problem.batch(step))
        run.params, run.state = run.update(grads, run.state, run.params)
        jax.block_until_ready(run.params)
        run.losses.append(float(loss))
        seconds.append(time.perf_counter() - began)
        run.tokens_per_s = tokens / float(np.mean(seconds))
        done = step + 1
        if done % settings.evaluate_every == 0 or done == steps:
            held_out = problem.evaluate(run.params, held_out_batch)
            run.held_out.append((done, float(held_out)))
        if store.is_due(done) or done == steps:
            save(run, store)
        show(done, run.losses[-1], run.tokens_per_s)


def save(run: Run, store: checkpoint.Store) -> None:
    """Writes a checkpoint of a run."""
    store.save(
        run.contender.label,
        step=len(run.losses),
        arrays={"params": run.params, "state": run.state},
        curves={"losses": run.losses, "held_out": run.held_out},
    )


def resume(run: Run, store: checkpoint.Store, step: int) -> None:
    """Puts a freshly started run where its checkpoint left off."""
    like = {"params": run.params, "state": run.state}
    arrays, curves = store.restore(run.contender.label, step, like)
    run.params, run.state = arrays["params"], arrays["state"]
    run.losses = curves["losses"]
    run.held_out = [(done, loss) for done, loss in curves["held_out"]]
