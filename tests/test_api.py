"""Public names are documented, their examples run, and the reference is today's."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil

import pytest

import dmuon_jax
from tests.api_reference import PAGES, reference

ROOT = pathlib.Path(__file__).parents[1]
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(dmuon_jax.__path__, "dmuon_jax.")
    if "pallas" not in module.name and not module.name.endswith("__main__")
)


def source(name):
    path = ROOT / name.replace(".", "/")
    return (
        path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    ).read_text()


@pytest.mark.parametrize("name", [name for name in MODULES if ">>> " in source(name)])
def test_examples_run(name):
    failed, run = doctest.testmod(importlib.import_module(name))
    assert failed == 0 and run > 0


def test_every_module_has_a_docstring():
    for name in MODULES:
        assert inspect.getdoc(importlib.import_module(name)), name


@pytest.mark.parametrize(("title", "module", "names"), PAGES, ids=[p[0] for p in PAGES])
def test_public_names_are_documented(title, module, names):
    for name in names:
        value = vars(module)[name]
        text = inspect.getdoc(value)
        assert text and not text.startswith(f"{name}("), f"{title}.{name}"


@pytest.mark.slow
def test_the_reference_is_today_s():
    stored = (ROOT / "notebooks" / "api.md").read_text()
    assert stored == reference(), "python -m tests.api_reference > notebooks/api.md"
