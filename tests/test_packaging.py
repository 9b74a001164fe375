"""What is shipped: wheel and sdist build, and the wheel works without the source."""

import ast
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def python(*arguments, cwd=ROOT, **environment):
    """Output of a Python process that must succeed; it sees only the paths given."""
    own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(argument) for argument in arguments],
        cwd=cwd,
        env=own | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist, built from a copy of what git holds."""
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    if int(version.split(".")[0]) < 77:
        pytest.skip(f"needs setuptools 77, got {version}")
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    files = python("git", "ls-files", "-z").split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    program = (
        "from setuptools import build_meta as b; "
        f"print(b.build_sdist({str(folder)!r})); print(b.build_wheel({str(folder)!r}))"
    )
    python(sys.executable, "-c", program, cwd=source)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_wheel_holds_data_types_and_command(built):
    wheel, _ = built
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (meta,) = (n for n in names if n.endswith("METADATA"))
        metadata = archive.read(meta).decode()
        (entry,) = (n for n in names if n.endswith("entry_points.txt"))
        assert "dmuon-jax = dmuon_jax.cli:main" in archive.read(entry).decode()
    assert {"dmuon_jax/py.typed", "dmuon_jax/planning/workloads.json"} <= set(names)
    assert not [n for n in names if n.startswith(("tests", "bench", "notebooks"))]
    for extra in ("cuda12", "cuda13", "tpu", "demo", "test", "notebooks"):
        assert f"Provides-Extra: {extra}" in metadata


def test_sdist_holds_readme_and_licence(built):
    _, sdist = built
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "dmuon_jax/py.typed"} <= names


@pytest.mark.slow
def test_installed_wheel_plans_in_an_empty_environment(built, tmp_path):
    wheel, _ = built
    python(sys.executable, "-m", "venv", tmp_path / "venv")
    inside = tmp_path / "venv" / "bin" / "python"
    python(inside, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    # Its dependencies are the ones installed here.
    path = os.pathsep.join(entry for entry in sys.path if entry.endswith("-packages"))
    command = tmp_path / "venv" / "bin" / "dmuon-jax"
    arguments = ("plan", "--model", "pi0", "--mesh", "fsdp=8")
    out = python(command, *arguments, cwd=tmp_path, PYTHONPATH=path)
    assert "414 matrices" in out
    program = "import dmuon_jax; print(dmuon_jax.__file__)"
    out = python(inside, "-c", program, cwd=tmp_path, PYTHONPATH=path)
    assert str(tmp_path) in out


def first_cell(path):
    """The code that a notebook starts with."""
    cells = json.loads(path.read_text())["cells"]
    return "".join(next(c["source"] for c in cells if c["cell_type"] == "code"))


def test_notebooks_start_alike():
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert len(paths) == 5 and len({first_cell(path) for path in paths}) == 1


@pytest.mark.slow
def test_first_cell_installs_where_jax_is_and_dmuon_is_not(built, tmp_path):
    """As on a hosted notebook: no repository around, no flags, a wheel uploaded."""
    wheel, _ = built
    shutil.copy(wheel, tmp_path)
    others = tmp_path / "others"
    others.mkdir()
    for folder in (entry for entry in sys.path if entry.endswith("-packages")):
        for item in pathlib.Path(folder).iterdir():
            here = others / item.name
            if "dmuon" not in item.name and not here.exists():
                here.symlink_to(item)
    python(sys.executable, "-m", "venv", tmp_path / "venv")
    inside = tmp_path / "venv" / "bin" / "python"
    cell = first_cell(ROOT / "notebooks" / "01_quickstart.ipynb")
    program = cell + "\nimport dmuon_jax; print(dmuon_jax.__file__)"
    hidden = {"XLA_FLAGS": "", "JAX_PLATFORMS": "", "PYTHONPATH": str(others)}
    out = python(inside, "-c", program, cwd=tmp_path, **hidden)
    assert ": 8 x " in out and str(tmp_path / "venv") in out
    again = python(inside, "-c", program, cwd=tmp_path, **hidden)  # nothing to install
    assert again == out


def test_dependencies_are_those_that_are_imported():
    named = {re.split("[>=[]", text)[0] for text in PROJECT["dependencies"]}
    optional = {"flax", "matplotlib", "orbax"}  # of the demo and of pictures
    found = set()
    for path in (ROOT / "dmuon_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.split(".")[0])
    assert found - set(sys.stdlib_module_names) - optional - {"dmuon_jax"} == named


def test_the_oldest_versions_tested_are_the_oldest_allowed():
    pinned = dict(re.findall(r"^(\w+)==(\S+)$", (ROOT / ".ci/oldest.txt").read_text(), re.M))
    assert pinned.pop("jaxlib") == pinned["jax"]
    extras = PROJECT["optional-dependencies"]
    texts = PROJECT["dependencies"] + extras["demo"] + extras["test"]
    allowed = dict(text.split(">=") for text in texts if ">=" in text)
    needed = [text.split(">=")[0] for text in PROJECT["dependencies"]]
    assert set(pinned) == {*needed, "flax"}
    for name, version in pinned.items():
        assert (version + ".").startswith(allowed[name] + "."), name
