"""The API reference, from docstrings: ``python -m tests.api_reference > notebooks/api.md``."""

import ast
import inspect
import textwrap
import typing
from types import ModuleType

import dmuon_jax
from dmuon_jax import kernels, planning, proof
from dmuon_jax.kernels import tune
from dmuon_jax.planning import clusters, cost, devices, estimate, workloads


def documented(module: ModuleType) -> tuple[str, ...]:
    """The names of ``__all__`` that are more than names of types."""
    return tuple(n for n in module.__all__ if not typing.get_origin(vars(module)[n]))


PAGES: tuple[tuple[str, ModuleType, tuple[str, ...]], ...] = (
    ("dmuon_jax", dmuon_jax, documented(dmuon_jax)),
    ("dmuon_jax.planning", planning, documented(planning)),
    ("dmuon_jax.planning.cost", cost, ("RooflineCost", "TableCost", "Timing")),
    ("dmuon_jax.planning.devices", devices, ("Device", "device_named")),
    (
        "dmuon_jax.planning.clusters",
        clusters,
        ("Placement", "model_leaves", "cluster_settings"),
    ),
    ("dmuon_jax.planning.estimate", estimate, ("Estimate", "estimate")),
    (
        "dmuon_jax.planning.workloads",
        workloads,
        ("Workload", "Matrices", "load_workload"),
    ),
    ("dmuon_jax.proof", proof, documented(proof)),
    ("dmuon_jax.kernels", kernels, documented(kernels)),
    ("dmuon_jax.kernels.tune", tune, ("Measurement", "measure", "tune", "load")),
)
HEAD = """# API reference

Made from docstrings by `python -m tests.api_reference`; examples are run by the tests.
"""


def parameters(node: ast.FunctionDef, skip: int = 0) -> str:
    """The arguments of a definition as they are written, without annotations."""
    arguments = node.args
    for argument in (*arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for argument in (arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    arguments.args = arguments.args[skip:]
    return ast.unparse(arguments)


def heading(name: str, value: object) -> str:
    """Name and arguments."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return f"{name}: an instance of {type(value).__name__}"
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    if isinstance(node, ast.FunctionDef):
        return f"{name}({parameters(node)})"
    return f"class {name}"


def methods(value: type) -> list[tuple[str, str]]:
    """Heading and docstring of each public method and property of a class."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    found = []
    for item in node.body:
        if not isinstance(item, ast.FunctionDef) or item.name.startswith("_"):
            continue
        kinds = [ast.unparse(decorator) for decorator in item.decorator_list]
        is_property = any("property" in kind for kind in kinds)
        text = ast.get_docstring(item) or ""
        head = item.name if is_property else f"{item.name}({parameters(item, skip=1)})"
        found.append((f"{value.__name__}.{head}", text))
    return found


def entry(name: str, value: object) -> str:
    """One name: heading, docstring, methods."""
    parts = [f"### `{heading(name, value)}`", block(inspect.getdoc(value) or "")]
    if inspect.isclass(value):
        for head, text in methods(value):
            if text:
                parts.append(f"`{head}`: {' '.join(text.split())}")
    return "\n\n".join(parts)


def block(text: str) -> str:
    """A docstring, first line as prose, the rest as it is written."""
    first, _, rest = text.partition("\n")
    return f"{first}\n\n```\n{rest.strip()}\n```" if rest.strip() else first


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, module, names in PAGES:
        parts.append(f"## {title}\n")
        parts += [entry(name, vars(module)[name]) + "\n" for name in names]
    return "\n".join(parts)


if __name__ == "__main__":
    print(reference(), end="")
