"""The README shows the tables of the benches' committed results."""

import importlib.util
import json
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def bench(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(name):
    return json.loads((ROOT / "bench" / "results" / name).read_text())


def test_scaling_tables_are_those_of_the_results():
    scaling = bench("bench_scaling")
    records = results("scaling.json")
    assert scaling.ratios_table(records) in README
    assert scaling.added_table(records) in README
    for commit in {record["commit"] for record in records}:
        assert commit in README


def test_table_of_experts_is_that_of_the_results():
    records = results("experts.json")
    assert bench("bench_experts").table(records) in README
    assert {record["commit"] for record in records.values()}.issubset(README.split("`"))


def test_a_case_is_compiled_once_and_a_refusal_has_no_ratio():
    scaling = bench("bench_scaling")
    cases = scaling.all_cases()
    assert len(cases) == len(set(cases))
    record = {"commit": "", "jax": "", "model": "pi0", "layout": "fsdp", "devices": 8}
    record |= {"clip": True, "batch": 1}
    records = [
        record | {"optimizer": "adamw", "step_us": 100.0},
        record | {"optimizer": "dmuon", "step_us": 103.0},
        record | {"optimizer": "muon", "refused": "why"},
    ]
    case = scaling.Case("pi0", "fsdp", 8, True, "dmuon")
    assert scaling.ratio(records, case) == 1.03
    for other in ("muon", "dmuon-local"):
        changed = scaling.dataclasses.replace(case, optimizer=other)
        assert scaling.ratio(records, changed) is None
    assert "| pi0 | 1.030 (–) | – (–)" in scaling.ratios_table(records)
