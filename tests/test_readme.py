"""What the README says is what the code says."""

import pathlib
import re

from tests.layout_table import table

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_table_of_layouts_is_today_s():
    assert table() in README


def test_the_map_names_files_that_exist():
    rows = re.findall(r"^\| (`[^|]*`[^|]*) \|", README.split("## Where things are")[1], re.M)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(names) > 20
    for name in names:
        inside = ROOT / "dmuon_jax" / name
        assert (ROOT / name).exists() or inside.exists(), name
