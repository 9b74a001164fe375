"""Notebooks from their sources: ``python notebooks/build.py [NAME ...]``.

A source is a Python file in ``sources/`` whose cells start with ``# %%``, text cells with
``# %% [markdown]``; a line such as ``# %matplotlib inline`` is a magic command. Building
runs the cells and stores what they show; needs nbclient and ipykernel
(``pip install 'dmuon_jax[notebooks]'``).
"""

import os
import pathlib
import re
import sys
import time

import nbformat
from nbclient import NotebookClient

FOLDER = pathlib.Path(__file__).parent
SOURCES = FOLDER / "sources"
SECONDS = 600


def cells_of(text: str) -> list[nbformat.NotebookNode]:
    """The cells of a source, without outputs."""
    cells = []
    for number, part in enumerate(re.split(r"^# %%", text, flags=re.M)[1:]):
        head, _, body = part.partition("\n")
        body = body.strip("\n")
        if head.strip() == "[markdown]":
            lines = [re.sub(r"^# ?", "", line) for line in body.splitlines()]
            cell = nbformat.v4.new_markdown_cell("\n".join(lines))
        else:
            magic = re.sub(r"^# (%\w)", r"\1", body, flags=re.M)
            cell = nbformat.v4.new_code_cell(magic)
        cell.id = f"cell-{number}"
        cells.append(cell)
    return cells


def notebook_of(name: str) -> nbformat.NotebookNode:
    """The notebook of a source, without outputs."""
    text = (SOURCES / f"{name}.py").read_text(encoding="utf-8")
    notebook = nbformat.v4.new_notebook(cells=cells_of(text))
    notebook.metadata["kernelspec"] = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    return notebook


def execute(notebook: nbformat.NotebookNode) -> None:
    """Runs all cells in a fresh kernel; an error in one is fatal.

    The kernel sees the dmuon_jax of this repository, whatever is installed, and no virtual
    devices of this process.
    """
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(FOLDER.parent)
    NotebookClient(
        notebook,
        timeout=SECONDS,
        coalesce_streams=True,  # else outputs are cut where the kernel happened to flush
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute(env=environment)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which would change in every build


def main(names: list[str]) -> None:
    """Builds the notebooks called ``names``, or all."""
    for name in names or sorted(path.stem for path in SOURCES.glob("*.py")):
        started = time.perf_counter()
        notebook = notebook_of(name)
        execute(notebook)
        nbformat.write(notebook, FOLDER / f"{name}.ipynb")
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
