"""Held-out loss of Muon and its variants at equal steps and equal tuning effort.

    python bench/bench_convergence.py             # minutes on two CPU cores
    python bench/bench_convergence.py --steps 500 --width 128

The demo's byte-level GPT, smaller, on the text of Python's standard library, on one device.
Every optimizer gets the same rates to try, on a seed of its own, and the best by held-out
loss then trains with every other seed. Writes the numbers and a plot of them.
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from dmuon_jax import dmuon
from dmuon_jax.demo.model import Gpt, ModelConfig, muon_dimension_numbers
from dmuon_jax.demo.text import Corpus, draw_batch, load_corpus
from dmuon_jax.variants import adamuon, normuon

RESULTS = pathlib.Path(__file__).parent / "results" / "convergence"
RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
TUNING_SEED = 100
BATCH, HELD_OUT_WINDOWS, WARMUP = 16, 128, 10
BASELINE = "optax.contrib.muon"
DECAY = 0.1
MUON = {
    "weight_decay": DECAY,
    "consistent_rms": 0.2,
    "muon_weight_dimension_numbers": muon_dimension_numbers,
}

# Each at rate 1: everything an update holds, its decay too, is proportional to the rate.
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "AdamW": lambda: optax.adamw(1.0, weight_decay=DECAY),
    BASELINE: lambda: optax.contrib.muon(1.0, **MUON),
    "dmuon direct bfloat16": lambda: dmuon(
        1.0, method="direct", compute_dtype="bfloat16", **MUON
    ),
    "dmuon gram float16": lambda: dmuon(
        1.0, method="gram", compute_dtype="float16", **MUON
    ),
    "NorMuon": lambda: normuon(1.0, **MUON),
    "AdaMuon": lambda: adamuon(1.0, **MUON),
}


class Trainer:
    """Trains one model with any optimizer: compiled once for each."""

    def __init__(self, config: ModelConfig, corpus: Corpus, steps: int):
        self.config, self.corpus, self.steps = config, corpus, steps
        self.graph, _ = nnx.split(Gpt(config, nnx.Rngs(0)))
        self.evaluate = jax.jit(self.loss)

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(self.graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    def make_step(self, tx: optax.GradientTransformation):
        """Compiled ``(params, state, tokens, rate) -> (params, state, loss)``."""
        chain = optax.chain(optax.clip_by_global_norm(1.0), tx)

        def step(params, state, tokens, rate):
            loss, grads = jax.value_and_grad(self.loss)(params, tokens)
            updates, state = chain.update(grads, state, params)
            updates = jax.tree.map(lambda u: rate * u, updates)
            return optax.apply_updates(params, updates), state, loss

        return chain.init, jax.jit(step)

    def draw(self, data: np.ndarray, seed: int, step: int, size: int) -> jax.Array:
        return jnp.asarray(draw_batch(data, seed, step, size, self.config.length + 1))

    def run(self, init, step, rate: float, seed: int) -> dict[str, Any]:
        """One training from scratch: training losses, and the held-out loss at the end."""
        params = nnx.to_pure_dict(nnx.split(Gpt(self.config, nnx.Rngs(seed)))[1])
        state, losses = init(params), []
        for index in range(self.steps):
            tokens = self.draw(self.corpus.train, seed, index, BATCH)
            warm = np.float32(rate * min(1.0, (index + 1) / WARMUP))
            params, state, loss = step(params, state, tokens, warm)
            losses.append(loss)
        tokens = self.draw(self.corpus.held_out, 0, 0, HELD_OUT_WINDOWS)
        held_out = float(self.evaluate(params, tokens))
        return {"held_out": held_out, "losses": [round(float(x), 4) for x in losses]}


def compare(trainer: Trainer, seeds: int) -> dict[str, Any]:
    """The sweep and the final runs of every optimizer."""
    found = {}
    for name, make in OPTIMIZERS.items():
        start = time.perf_counter()
        init, step = trainer.make_step(make())
        sweep = {
            rate: trainer.run(init, step, rate, TUNING_SEED)["held_out"]
            for rate in RATES
        }
        best = min(sweep, key=lambda rate: (not np.isfinite(sweep[rate]), sweep[rate]))
        runs = [trainer.run(init, step, best, seed) for seed in range(seeds)]
        losses = [run["held_out"] for run in runs]
        spread = statistics.stdev(losses) if seeds > 1 else 0.0
        shown = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in sweep.items())
        print(
            f"{name:24}{statistics.mean(losses):7.4f} +- {spread:.4f}  rate {best:g}  "
            f"({shown})  {time.perf_counter() - start:.0f} s",
            flush=True,
        )
        found[name] = {
            "rate": best,
            "sweep": sweep,
            "held_out": losses,
            "mean": statistics.mean(losses),
            "stdev": spread,
            "losses": [run["losses"] for run in runs],
        }
    return found


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
    """Smoothed training loss, mean over seeds, and the held-out losses of every seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for index, (name, found) in enumerate(results.items()):
        losses = np.mean(found["losses"], axis=0)
        window = max(1, len(losses) // 15)
        smooth = np.convolve(losses, np.ones(window) / window, "valid")
        left.plot(np.arange(window, len(losses) + 1), smooth, label=name)
        right.plot(found["held_out"], [index] * len(found["held_out"]), "o")
    left.set(xlabel="step", ylabel=f"training loss, mean of {window} steps")
    left.legend()
    right.set(xlabel="held-out loss, one point a seed")
    right.set_yticks(range(len(results)), list(results))
    right.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    config = ModelConfig(
        width=args.width,
        num_layers=args.layers,
        num_heads=4,
        hidden=2 * args.width,
        length=64,
    )
    corpus = load_corpus(None, config.length + 1)
    print(f"{corpus.name}; held-out loss after {args.steps} steps, {args.seeds} seeds")
    results = compare(Trainer(config, corpus, args.steps), args.seeds)
    base = results[BASELINE]
    for name, found in results.items():
        difference = found["mean"] - base["mean"]
        print(f"{name:24}{difference:+8.4f} against {BASELINE}")
    RESULTS.parent.mkdir(exist_ok=True)
    record = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "text_sha256": corpus.digest,
        **vars(args),
        "results": results,
    }
    RESULTS.with_suffix(".json").write_text(json.dumps(record) + "\n")
    plot(results, RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main()
