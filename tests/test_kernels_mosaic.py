"""The Hopper kernels in Mosaic's interpreter with race detection, and planted faults.

Each case runs in a process of its own, with a time limit: the interpreter can hang.
"""

import json
import pathlib
import subprocess
import sys

import jax
import pytest

HERE = pathlib.Path(__file__).parent
CASES = ("square", "wide", "narrow", "one slice")

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Mosaic's interpreter needs jax 0.11"
)


def run(kind, name):
    """What the case printed, and its JSON line (None where it ended in an error)."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "mosaic_cases.py"), kind, name],
        cwd=HERE.parent,
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = done.stdout.splitlines()
    result = json.loads(lines[-1]) if done.returncode == 0 else None
    return done.stdout + done.stderr, result


@pytest.mark.parametrize("name", CASES)
def test_values_zeros_and_no_races(name):
    printed, result = run("case", name)
    assert result is not None, printed
    assert result["gram"] <= 1.5 * result["gram_xla"]
    assert result["product"] <= 1.5 * result["product_xla"]
    assert result["zeros"] and not result["races"]


@pytest.mark.parametrize("name", ["race", "uncommitted"])
def test_planted_races_are_reported(name):
    """Older interpreters report a race and go on, newer ones raise an error."""
    printed, result = run("fault", name)
    assert "race detected" in printed.lower()
    assert result is None or result["races"]


@pytest.mark.parametrize("name", ["unwritten tile", "transposed tile"])
def test_planted_wrong_tiles_are_seen(name):
    printed, result = run("fault", name)
    assert result is not None, printed
    assert result["gram"] > 1e-2 and result["product"] > 1e-2
