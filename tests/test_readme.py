"""What the README says is what the code says."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

from dmuon_jax.cli.main import make_parser
from tests.layout_table import table

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_table_of_layouts_is_today_s():
    assert table() in README


SECTION = README.split("## Where things are")[1].split("\n## ")[0]


def test_the_map_names_files_that_exist():
    rows = re.findall(r"^\| (`[^|]*`[^|]*) \|", SECTION, re.M)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(names) > 20
    for name in names:
        inside = ROOT / "dmuon_jax" / name
        assert (ROOT / name).exists() or inside.exists(), name


def code_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.S)


def test_the_ten_lines_run_as_they_stand():
    ten = code_blocks(README.split("## Ten lines")[1])[0]
    params = {"w": jnp.ones((16, 24)), "bias": jnp.ones(24)}
    names = {"params": params, "loss": lambda p, x: jnp.sum((x @ p["w"] + p["bias"]) ** 2)}
    exec(ten, names)
    after, state = names["step"](names["params"], names["opt_state"], jnp.ones((4, 16)))
    assert jax.tree.structure(state) == jax.tree.structure(names["opt_state"])
    assert not np.allclose(after["w"], 1)


def test_the_commands_of_the_readme_parse():
    commands = re.findall(r"^dmuon-jax (.*?)(?:\s+#.*)?$", README, re.M)
    assert len(commands) >= 3
    for command in commands:
        make_parser().parse_args(command.split())


def test_both_readmes_show_the_same_code_and_link_to_files_that_exist():
    chinese = (ROOT / "README.zh.md").read_text()
    ours = [re.sub("#.*", "", block) for block in code_blocks(chinese)]
    assert ours == [re.sub("#.*", "", block) for block in code_blocks(README)]
    for text in (README, chinese, (ROOT / "CONTRIBUTING.md").read_text()):
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            assert link.startswith("http") or (ROOT / link).exists(), link
