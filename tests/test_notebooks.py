"""The notebooks: stored as their sources say, and running from top to bottom."""

import importlib.util
import json
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.stem for path in (FOLDER / "sources").glob("*.py"))
QUICK = ("02_owners",)


@pytest.fixture(scope="module")
def build():
    """The module that builds notebooks."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    spec = importlib.util.spec_from_file_location("build", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_stored_notebook_is_its_source_with_outputs(build, name):
    stored = json.loads((FOLDER / f"{name}.ipynb").read_text())
    cells = [("".join(cell["source"]), cell["cell_type"]) for cell in stored["cells"]]
    source = [(cell.source, cell.cell_type) for cell in build.notebook_of(name).cells]
    assert cells == source, f"python notebooks/build.py {name}"
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs and not [o for o in outputs if o["output_type"] == "error"]
    assert not [o for o in outputs if o.get("name") == "stderr"]


def test_there_are_five():
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05"]
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == NAMES


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="one Python is enough")
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES],
)
def test_notebook_runs(build, name):
    notebook = build.notebook_of(name)
    build.execute(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    shown = [output for cell in code for output in cell.outputs]
    assert not [o for o in shown if o.output_type == "error" or o.get("name") == "stderr"]
    stored = json.loads((FOLDER / f"{name}.ipynb").read_text())
    kinds = [kinds_of(cell) for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert [kinds_of(cell) for cell in code] == kinds, f"python notebooks/build.py {name}"


def kinds_of(cell):
    """What the outputs of a cell are: text, a table, a picture."""
    return {kind for o in cell["outputs"] for kind in o.get("data", {"text": None})}


def test_errors_are_fatal(build):
    notebook = build.notebook_of(QUICK[0])
    notebook.cells = notebook.cells[:1] + build.cells_of(
        "# %%\nraise ValueError('no')\n"
    )
    with pytest.raises(Exception, match="ValueError"):
        build.execute(notebook)


def test_magic_and_text(build):
    source = "# %% [markdown]\n# # Title\n#\n# text\n\n# %%\n# %magic\n# no\n"
    text, code = build.cells_of(source)
    assert (text.cell_type, text.source) == ("markdown", "# Title\n\ntext")
    assert (code.cell_type, code.source) == ("code", "%magic\n# no")
