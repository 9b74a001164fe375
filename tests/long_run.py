"""Thousands of steps of the demo's model made tiny, on eight virtual devices.

``python -m tests.long_run --steps 2000`` trains with a schedule and accumulation, watches
what may grow, and fails where something did. Times are printed and judged by nobody.
"""

import argparse
import dataclasses
import gc
import os
import pathlib
import random
import sys
import time

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from dmuon_jax import dmuon, place_state, plan_owners, state_shardings
from dmuon_jax.demo import text
from dmuon_jax.demo.model import ModelConfig, muon_dimension_numbers
from dmuon_jax.demo.train import Settings, make_problem
from tests import conftest  # noqa: F401  (eight virtual devices)

SIZES = dict(width=16, num_layers=2, num_heads=2, hidden=24, length=8)


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run showed.

    Attributes:
      steps: steps done.
      programs: programs compiled for the step.
      compilations: programs of any kind compiled after the first steps.
      changed: paths of state arrays whose type or sharding differs from the first state's.
      live: arrays alive after the first quarter, and at the end.
      rss_bytes: memory of this process after the first quarter, and at the end.
      step_us: median time of a step in the first quarter and in the last.
      losses: mean loss of the first and of the last steps.
    """

    steps: int
    programs: int
    compilations: int
    changed: tuple[str, ...]
    live: tuple[int, int]
    rss_bytes: tuple[int, int]
    step_us: tuple[float, float]
    losses: tuple[float, float]

    def troubles(self) -> list[str]:
        """What must not be; the memory of a process is judged after 1000 steps or more."""
        found = []
        if self.programs != 1:
            found.append(f"{self.programs} programs compiled for the step")
        if self.compilations:
            found.append(f"{self.compilations} programs compiled after the first steps")
        if self.changed:
            found.append(f"another type or sharding at {', '.join(self.changed)}")
        if self.live[1] != self.live[0]:
            found.append(f"{self.live[0]} live arrays became {self.live[1]}")
        if self.steps >= 1000 and self.rss_bytes[1] > 1.05 * self.rss_bytes[0]:
            found.append(f"{self.rss_bytes[0]} bytes became {self.rss_bytes[1]}")
        if not self.losses[1] < 0.9 * self.losses[0]:
            found.append(f"loss {self.losses[0]} became {self.losses[1]}")
        return found


def rss_bytes() -> int:
    """Resident memory of this process."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def types(tree) -> dict:
    """The type (weak or not), sharding and memory of each array, by path."""
    return {
        jax.tree_util.keystr(path): (x.aval, x.sharding, x.sharding.memory_kind)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def make_corpus():
    """A text of few words."""
    words = random.Random(0).choices(["matrix ", "owner ", "plan ", "step\n"], k=4000)
    data = np.frombuffer("".join(words).encode(), np.uint8)
    cut = len(data) * 9 // 10
    return text.Corpus("words", data[:cut], data[cut:], digest="")


def run(steps: int) -> Report:
    """Trains; the accumulated gradients of two steps make one update."""
    mesh = Mesh(np.array(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
    settings = Settings(ModelConfig(**SIZES), batch_size=8, seed=0)
    problem = make_problem(settings, make_corpus(), mesh)
    params = problem.params
    options = dict(muon_weight_dimension_numbers=muon_dimension_numbers)
    plan = plan_owners(params, **options)
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.02, 10, steps)
    inner = dmuon(rate, weight_decay=0.01, ns_steps=2, plan=plan, **options)
    tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), inner), 2)
    shardings = state_shardings(tx, params, plan)
    state = place_state(tx.init(params), mesh, params)
    before = types((params, state))

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    places = (jax.tree.map(lambda x: x.sharding, params), shardings)
    step = jax.jit(update, donate_argnums=(0, 1), out_shardings=places)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **kwargs: compiled.append(name) if "backend_compile" in name else None
    )
    # The gradients' program keeps the first parameters: a copy may be donated.
    params = jax.tree.map(lambda x: x.copy(), params)
    warm, quarter = min(4, steps), steps // 4
    times, losses, seen, changed = [], [], [], {}
    for number in range(steps):
        if number in (warm, quarter):
            gc.collect()
            seen.append((len(compiled), len(jax.live_arrays()), rss_bytes()))
        began = time.perf_counter()
        loss, grads = problem.gradient(params, problem.batch(number))
        params, state = step(params, state, grads)
        losses.append(float(loss))
        times.append(time.perf_counter() - began)
        changed |= {p: 0 for p, x in types((params, state)).items() if x != before[p]}
    gc.collect()
    seen.append((len(compiled), len(jax.live_arrays()), rss_bytes()))
    times = 1e6 * np.array(times)
    return Report(
        steps=steps,
        programs=step._cache_size(),
        compilations=seen[-1][0] - seen[0][0],
        changed=tuple(changed),
        live=(seen[1][1], seen[-1][1]),
        rss_bytes=(seen[1][2], seen[-1][2]),
        step_us=(
            float(np.median(times[warm:quarter])),
            float(np.median(times[-quarter:])),
        ),
        losses=(float(np.mean(losses[:8])), float(np.mean(losses[-8:]))),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    report = run(options.steps)
    for name, value in dataclasses.asdict(report).items():
        print(f"{name}: {value}")
    first, last = report.step_us
    print(f"last quarter / first quarter of the steps' times: {last / first:.3f}")
    troubles = report.troubles()
    print("\n".join(troubles) or "Nothing grew.")
    sys.exit(bool(troubles))


if __name__ == "__main__":
    main()
