"""What the README says is what the code says."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

from dmuon_jax.cli.main import make_parser
from tests.layout_table import page

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def section(title):
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_table_of_layouts_is_today_s():
    stored = (ROOT / "notebooks" / "shardings.md").read_text()
    assert stored == page(), "python -m tests.layout_table > notebooks/shardings.md"


def test_the_map_names_every_file_once():
    rows = re.findall(r"^\| (`[^|]*`[^|]*) \|", section("Where things are"), re.M)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    inside = ROOT / "dmuon_jax"
    found = [ROOT / n if (ROOT / n).exists() else inside / n for n in names]
    assert len(found) == len(set(found))
    for path in found:
        assert path.exists(), path
    hidden = ("__", "py.typed")
    modules = {p for p in inside.iterdir() if not p.name.startswith(hidden)}
    assert modules <= set(found), modules - set(found)


def test_every_row_of_the_support_table_names_a_test():
    rows = section("Support").strip().splitlines()[2:]
    assert len(rows) > 8
    for row in rows:
        (shown_by,) = re.fullmatch(r"\| .* \| `([^`]*)` \|", row).groups()
        assert (ROOT / shown_by).exists(), row


def test_there_are_twelve_questions():
    asked = re.findall(r"^\*\*[^*]+\*\*", section("Questions"), re.M)
    assert len(asked) == 12


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


def test_both_readmes_show_the_same_and_link_to_files_that_exist():
    chinese = (ROOT / "README.zh.md").read_text()
    ours = [re.sub("#.*", "", block) for block in code_blocks(chinese)]
    assert ours == [re.sub("#.*", "", block) for block in code_blocks(README)]
    # The same figures and as many questions.
    rows = [row for row in README.splitlines() if re.match(r"\| .*\| +\d+ \|", row)]
    assert rows and all(row in chinese for row in rows)
    assert len(re.findall(r"^\*\*[^*]+\*\* ", chinese, re.M)) == 12
    for text in (README, chinese, (ROOT / "CONTRIBUTING.md").read_text()):
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            assert link.startswith("http") or (ROOT / link).exists(), link
