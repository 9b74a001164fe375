"""Model step times of public models on GPU clusters, by optimizer; no GPU needed.

    JAX_PLATFORMS=cpu python bench/bench_scaling.py                 # what is missing
    JAX_PLATFORMS=cpu python bench/bench_scaling.py --again dmuon   # these afresh
    python bench/bench_scaling.py --print                           # the tables

Needs the CUDA plugin (``pip install 'dmuon_jax[cuda13]'``), and a minute or so a case. A
case is one optimizer's step of one model on one mesh; each is written as soon as it is
known, a refusal with its sentence, and an interrupted run goes on where it stopped. Layers
are a scan, so whole models are compiled and nothing is extrapolated.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess

import jax

from dmuon_jax.planning.workloads import read_json
from dmuon_jax.proof.models import model_named
from dmuon_jax.proof.simulate import simulate
from dmuon_jax.proof.steps import OPTIMIZERS

RESULTS = pathlib.Path(__file__).parent / "results" / "scaling.json"
PER_NODE = 8
COUNTS = (8, 64, 128, 512)
PUBLISHED = (
    "qwen2.5-1.5b",
    "qwen2.5-7b",
    "llama-3.2-3b",
    "llama-3.1-8b",
    "pi0",
    "wall-x",
)
DENSE = (*PUBLISHED, "qwen3-32b")
EXPERTS = ("moonlight-16b-a3b",)
MODELS = (*DENSE, *EXPERTS)
# Where a tower's width does not divide by more; the rest are replicas.
MOST_SHARDS = {"pi0": 128, "wall-x": 128}


@dataclasses.dataclass(frozen=True)
class Case:
    """One step to compile.

    Attributes:
      model: name of a workload.
      layout: "fsdp" over all devices (`MOST_SHARDS` apart); "hsdp" is FSDP in a node,
        replicated over nodes;
        "experts" is FSDP with the experts of a layer spread over the devices of a node.
      devices: how many.
      clip: whether gradients are clipped by their global norm.
      optimizer: one of `dmuon_jax.proof.steps.OPTIMIZERS`.
      batch: sequences on one device.
    """

    model: str
    layout: str
    devices: int
    clip: bool
    optimizer: str
    batch: int = 1

    def mesh(self) -> dict[str, int]:
        """Sizes of the mesh axes."""
        if self.layout == "hsdp":
            return {"data": self.devices // PER_NODE, "fsdp": PER_NODE}
        if self.layout == "experts":
            return {"fsdp": self.devices // PER_NODE, "expert": PER_NODE}
        shards = min(self.devices, MOST_SHARDS.get(self.model, self.devices))
        if shards < self.devices:
            return {"data": self.devices // shards, "fsdp": shards}
        return {"fsdp": self.devices}


def main_layout(model: str) -> str:
    """The layout of a model in the first table."""
    return "experts" if model in EXPERTS else "fsdp"


def all_cases() -> list[Case]:
    """Every case, the most wanted first."""
    pair, found = ("adamw", "dmuon"), []

    def add(count, optimizers, *, models=MODELS, layout=None, clip=True, batch=1):
        for model in models:
            for name in optimizers:
                where = layout or main_layout(model)
                found.append(Case(model, where, count, clip, name, batch))

    for count in (128, 512, 64, 8):
        add(count, pair)
    add(128, pair, batch=2)
    add(128, pair, clip=False)
    for count in (128, 64, 512):
        add(count, (*pair, "dmuon-local"), models=DENSE, layout="hsdp")
    add(128, ("muon",))
    for count in (64, 8):
        add(count, ("muon",))
    for count in (64, 8, 512):
        add(count, pair, clip=False)
    add(512, ("muon",))
    return found


def measure(case: Case, arguments: argparse.Namespace) -> dict:
    """The record of one case."""
    record = dataclasses.asdict(case) | {"commit": commit(), "jax": jax.__version__}
    try:
        found = simulate(
            model_named(case.model),
            case.mesh(),
            arguments.device,
            sequence=arguments.sequence,
            batch_per_device=case.batch,
            optimizers=(case.optimizer,),
            clip=case.clip,
        )
    except (ValueError, NotImplementedError) as error:
        return record | {"refused": str(error)}
    run = json.loads(found.to_json())["runs"][0]
    del run["ratio"]
    return record | run


def commit() -> str:
    """The commit at hand, with a mark where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def key(record: dict) -> tuple:
    return tuple(record[field.name] for field in dataclasses.fields(Case))


def found(records: list[dict], case: Case) -> dict | None:
    """The record of `case` that holds a step time."""
    wanted = dataclasses.astuple(case)
    return next((x for x in records if key(x) == wanted and "step_us" in x), None)


def ratio(records: list[dict], case: Case) -> float | None:
    """Step time of `case` over AdamW's."""
    mine = found(records, case)
    base = found(records, dataclasses.replace(case, optimizer="adamw"))
    return mine["step_us"] / base["step_us"] if mine and base else None


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def markdown(rows: list[tuple[str, ...]]) -> str:
    """The first row is the head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * (len(rows[0]) - 1))
    return "\n".join(lines)


def published(model: str, count: int) -> float | None:
    """DMuon's measured step over AdamW's, PyTorch on A800s."""
    for title, models in read_json()["published_step_ms"].items():
        if title.startswith(f"{count} x ") and model in models:
            return models[model]["dmuon_pytorch"] / models[model]["adamw"]
    return None


def ratios_table(records: list[dict]) -> str:
    """Step over AdamW's by number of devices: dmuon, and optax's Muon in brackets."""
    rows = [
        (
            "model",
            *(f"{count} GPUs" for count in COUNTS),
            "128, 2 sequences",
            "128, no clipping",
            "128, HSDP (owners in a node)",
            "DMuon on 8, 128 A800",
        )
    ]
    for model in MODELS:
        ours = Case(model, main_layout(model), 128, True, "dmuon")
        cells = []
        for count in COUNTS:
            case = dataclasses.replace(ours, devices=count)
            theirs = ratio(records, dataclasses.replace(case, optimizer="muon"))
            cells.append(
                f"{number(ratio(records, case), 3)} ({number(theirs, 2)})"
            )
        for change in ({"batch": 2}, {"clip": False}):
            cells.append(number(ratio(records, dataclasses.replace(ours, **change)), 3))
        hsdp = dataclasses.replace(ours, layout="hsdp")
        local = dataclasses.replace(hsdp, optimizer="dmuon-local")
        cells.append(
            f"{number(ratio(records, hsdp), 3)} ({number(ratio(records, local), 3)})"
        )
        theirs = ", ".join(number(published(model, count), 3) for count in (8, 128))
        if any(character.isdigit() for character in "".join(cells)):
            rows.append((model, *cells, theirs))
    return markdown(rows)


def added_table(records: list[dict]) -> str:
    """What dmuon adds to AdamW's step at 128 GPUs, milliseconds."""
    parts = ("matmul", "memory", "exposed", "imbalance")
    rows = [
        (
            "model",
            "AdamW ms",
            "dmuon adds ms",
            "matmul",
            "memory passes",
            "exposed communication",
            "waits for owners",
            "exchange, of it exposed",
            "≤ 1.02",
        )
    ]
    for model in MODELS:
        case = Case(model, main_layout(model), 128, True, "dmuon")
        ours = found(records, case)
        base = found(records, dataclasses.replace(case, optimizer="adamw"))
        if not (ours and base):
            continue
        added = [
            ours["split_us"].get(part, 0.0) - base["split_us"].get(part, 0.0)
            for part in parts
        ]
        exchange = ours["exchange_us"]
        rows.append(
            (
                model,
                f"{base['step_us'] / 1e3:.1f}",
                f"{(ours['step_us'] - base['step_us']) / 1e3:+.2f}",
                *(f"{round(us / 1e3, 2) + 0.0:+.2f}" for us in added),
                f"{exchange['total'] / 1e3:.2f}, {exchange['exposed'] / 1e3:.2f}",
                "yes" if ours["step_us"] <= 1.02 * base["step_us"] else "no",
            )
        )
    return markdown(rows)


def tables(records: list[dict]) -> str:
    """What the README shows."""
    return f"{ratios_table(records)}\n\n{added_table(records)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", default=MODELS)
    add("--counts", nargs="+", type=int, default=COUNTS)
    add("--optimizers", nargs="+", default=OPTIMIZERS)
    add("--again", nargs="+", default=(), help="optimizers to compile afresh")
    add("--most", type=int, default=1000, help="cases to compile at most")
    add("--device", default="h200")
    add("--sequence", type=int, default=4096)
    add("--out", type=pathlib.Path, default=RESULTS)
    add("--print", action="store_true", help="print the tables, compile nothing")
    arguments = parser.parse_args()
    records = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    if arguments.print:
        print(tables(records))
        return
    records = [x for x in records if x["optimizer"] not in arguments.again]
    done = {key(record) for record in records}
    wanted = [
        case
        for case in all_cases()
        if case.model in arguments.models
        and case.devices in arguments.counts
        and case.optimizer in arguments.optimizers
        and dataclasses.astuple(case) not in done
    ]
    for case in wanted[: arguments.most]:
        records.append(measure(case, arguments))
        jax.clear_caches()
        arguments.out.write_text(json.dumps(records, indent=1) + "\n")
        last = records[-1]
        print(case, last.get("step_us"), last.get("refused", ""), flush=True)


if __name__ == "__main__":
    main()
