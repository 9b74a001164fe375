"""The demo at its tiny size: training, resuming, what it writes, what it refuses."""

import contextlib
import io
import json
import pathlib
import random
import sys

import jax
import numpy as np
import pytest

from dmuon_jax.demo import model, report, text
from dmuon_jax.demo.__main__ import main
from dmuon_jax.demo.contenders import LABELS

STEPS = 4


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, output and errors of the demo at its tiny size."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["--size", "tiny", "--repeats", "1", *map(str, arguments)])
    return code, out.getvalue(), err.getvalue()


def record(folder: pathlib.Path) -> dict:
    return json.loads((folder / "demo.json").read_text())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small text file."""
    words = random.Random(0).choices(["matrix", "owner", "plan", "step\n"], k=3000)
    path = tmp_path_factory.mktemp("data") / "words.txt"
    path.write_text(" ".join(words))
    return path


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A finished run: its folder and what it printed."""
    out = tmp_path_factory.mktemp("finished")
    code, printed, errors = run("--data", data, "--steps", STEPS, "--out", out)
    assert (code, errors) == (0, "")
    return out, printed


def test_table_shows_what_was_measured(finished):
    out, printed = finished
    rows = record(out)["rows"]
    assert [row["label"] for row in rows] == list(LABELS)
    for head in ("held-out", "update", "collectives", "moved", "momentum", "tokens/s"):
        assert head in printed
    for row in rows:
        assert f"{row['held_out_loss']:.4f}" in printed
        assert row["steps"] == STEPS
        assert row["update_ms"] > 0 and row["tokens_per_s"] > 0
    adamw, theirs, ours = rows
    assert 0 < ours["collectives"] < theirs["collectives"]
    assert 0 < ours["collective_bytes"] < theirs["collective_bytes"]
    assert ours["momentum_bytes"] == theirs["momentum_bytes"] < adamw["momentum_bytes"]


def test_dmuon_trains_like_optax_muon(finished):
    out, printed = finished
    losses = record(out)["losses"]
    assert [len(losses[label]) for label in LABELS] == [STEPS] * 3
    np.testing.assert_allclose(losses["dmuon"], losses["optax.contrib.muon"], rtol=1e-4)
    assert "differ by at most" in printed
    # All start from the same weights; AdamW then goes its own way.
    assert losses["AdamW"][0] == losses["dmuon"][0]
    assert abs(losses["AdamW"][-1] - losses["dmuon"][-1]) > 1e-3


def test_progress_has_a_line_per_run(finished):
    _, printed = finished
    for label in LABELS:
        assert f"{label:<19}[{'#' * 30}] {STEPS}/{STEPS}  loss" in printed


def test_plot_is_a_png(finished):
    out, _ = finished
    assert (out / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_resumed_run_equals_the_uninterrupted_one(finished, data, tmp_path):
    whole, _ = finished
    code, _, errors = run("--data", data, "--steps", 2, "--out", tmp_path)
    assert (code, errors) == (0, "")
    code, printed, errors = run(
        "--data", data, "--steps", STEPS, "--out", tmp_path, "--resume"
    )
    assert (code, errors) == (0, "")
    for label in LABELS:
        assert f"{label} continues after step 2." in printed
    assert record(tmp_path)["losses"] == record(whole)["losses"]
    for label in LABELS:
        last = [record(folder)["held_out"][label][-1] for folder in (tmp_path, whole)]
        assert last[0] == last[1]


def test_checkpoints_are_refused_by_other_runs(finished, data, tmp_path):
    """Nothing is mixed up.

    Fault: a checkpoint of the demo is of another text, seed or batch size
    Happens: `--resume` ends with one sentence and exit code 2
    Kept: the results recorded before
    """
    out, _ = finished
    before = record(out)
    other = tmp_path / "other.txt"
    other.write_text(data.read_text().upper())
    same = ("--data", data, "--out", out, "--resume")
    refused = {
        "seed was 0 and is now 7": (*same, "--seed", 7),
        "batch_size was 8 and is now 16": (*same, "--batch", 16),
        "text was": ("--data", other, "--out", out, "--resume"),
        "--steps must be at least the 4 steps": (*same, "--steps", 3),
    }
    for sentence, arguments in refused.items():
        assert_refused(sentence, *arguments)
    assert record(out) == before


def test_damaged_checkpoint_is_refused(finished, data, tmp_path):
    """By a sentence, not a traceback.

    Fault: a checkpoint of the demo is damaged
    Happens: `--resume` ends with one sentence and exit code 2
    Kept: the files, as they are
    """
    out, _ = finished
    checkpoint = out / "demo_checkpoints" / "AdamW" / str(STEPS)
    broken = tmp_path / "demo_checkpoints" / "AdamW" / str(STEPS)
    for file in checkpoint.rglob("*"):
        target = broken / file.relative_to(checkpoint)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.is_file():
            target.write_bytes(file.read_bytes() if file.suffix else b"")
    (broken / "identity" / "metadata").write_text("{")
    assert_refused("damaged", "--data", data, "--out", tmp_path, "--resume")


def assert_refused(sentence: str, *arguments: object) -> None:
    code, _, errors = run(*arguments)
    assert code == 2
    assert sentence in errors
    assert errors.startswith("error: ") and errors.count("\n") == 1


def test_unusable_input_is_refused(data, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    short = tmp_path / "short.txt"
    short.write_text("too short")
    binary = tmp_path / "binary"
    binary.mkdir()
    (binary / "zeros").write_bytes(b"\0" * 10_000)
    out = ("--out", tmp_path / "out")
    assert_refused("must name a file or a folder", "--data", tmp_path / "none", *out)
    assert_refused("folder with files in it", "--data", empty, *out)
    assert_refused("got 9 (in", "--data", short, *out)
    assert_refused("got 0 (in", "--data", binary, *out)
    assert_refused("multiple of the 8 devices", "--data", data, "--batch", 9, *out)
    assert_refused("--seed must be", "--data", data, "--seed", -1, *out)
    assert_refused("--out must name a folder", "--data", data, "--out", data / "in")
    assert_refused("got none", "--data", data, "--resume", *out)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--method", "fast"]])
def test_wrong_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_standard_library_is_the_default_text():
    files = text.standard_library_files()
    names = {file.name for file in files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any("site-packages" in file.parts for file in files)


def test_held_out_text_is_never_trained_on(tmp_path):
    path = tmp_path / "counts"
    values = np.arange(1, 101, dtype=np.uint8).repeat(50)
    path.write_bytes(values.tobytes())
    corpus = text.load_corpus(path, window=17)
    assert set(corpus.train) | set(corpus.held_out) == set(values)
    assert not set(corpus.train) & set(corpus.held_out)
    assert corpus.num_bytes == len(values)
    assert corpus.train.nbytes == 9 * corpus.held_out.nbytes


def test_batches_depend_on_seed_and_step_only():
    data = np.arange(200, dtype=np.uint8)
    first = text.draw_batch(data, seed=0, step=3, batch_size=4, window=9)
    again = text.draw_batch(data, seed=0, step=3, batch_size=4, window=9)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(np.diff(first), 1)
    for seed, step in ((1, 3), (0, 4)):
        other = text.draw_batch(data, seed, step, batch_size=4, window=9)
        assert (first != other).any()


def test_only_the_blocks_kernels_go_to_muon():
    shape = jax.ShapeDtypeStruct
    params = {
        "embed": {"embedding": shape((256, 8), np.float32)},
        "blocks": {
            0: {
                "norm": {"scale": shape((8,), np.float32)},
                "query": {"kernel": shape((8, 8), np.float32)},
                "key_value": {"kernel": shape((8, 2, 4), np.float32)},
            }
        },
    }
    marks = model.muon_dimension_numbers(params)
    assert marks["embed"]["embedding"] is None
    block = marks["blocks"][0]
    assert block["norm"]["scale"] is None
    assert tuple(block["query"]["kernel"]) == (0, 1)
    assert tuple(block["key_value"]["kernel"]) == (0, 2)


def test_progress_bar_rewrites_its_line_on_a_terminal(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    bar = report.ProgressBar("dmuon", steps=3)
    for done in (1, 2, 3):
        bar.show(done, loss=2.5, tokens_per_s=1000.0)
    lines = terminal.getvalue()
    assert lines.count("\r") == 3 and lines.count("\n") == 1
    assert "1/3" in lines and "loss 2.5000     1000 tokens/s" in lines
