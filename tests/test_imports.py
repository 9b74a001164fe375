"""The house rules that can be read from import statements."""

import ast
import pathlib
import re
import subprocess
import sys

PACKAGE = pathlib.Path(__file__).parents[1] / "dmuon_jax"
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path) for path in FILES}


def imports(path):
    """Dotted names that a file imports when it runs, wherever in the file."""
    tree = ast.parse(path.read_text())
    for node in list(ast.walk(tree)):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module
                yield inner


def graph():
    modules = {name_of(path): path for path in FILES}
    return {
        name: {found for found in imports(path) if found in modules and found != name}
        for name, path in modules.items()
    }


def test_imports_have_no_cycle():
    edges, done = graph(), set()

    def visit(name, above):
        assert name not in above, " -> ".join((*above, name))
        if name not in done:
            for other in sorted(edges[name]):
                visit(other, (*above, name))
            done.add(name)

    for name in edges:
        if PACKAGE.name != name:  # the package itself imports everything
            edges[name].discard(PACKAGE.name)
    for name in edges:
        visit(name, ())


def test_planning_needs_no_jax():
    for path in (PACKAGE / "planning").glob("*.py"):
        assert not [x for x in imports(path) if x.split(".")[0] in ("jax", "optax")], path


def test_kernels_know_nothing_of_muon():
    for path in (PACKAGE / "kernels").glob("*.py"):
        ours = [x for x in imports(path) if x.startswith("dmuon_jax")]
        assert all(x.startswith("dmuon_jax.kernels") for x in ours), path


def test_only_these_files_import_these_packages():
    allowed = {
        "highspy": r"planning/milp\.py",
        "jax.experimental.pallas": r"kernels/.*pallas.*\.py",
        "matplotlib": r"demo/.*|proof/picture\.py|.*plot.*\.py|cli.*",
        "orbax": r"demo/.*",
    }
    for package, where in allowed.items():
        for path in FILES:
            found = [x for x in imports(path) if x == package or x.startswith(package + ".")]
            relative = path.relative_to(PACKAGE).as_posix()
            assert not found or re.fullmatch(where, relative), (package, relative)


def test_only_the_exchange_calls_collectives():
    calls = r"lax\.(all_to_all|all_gather|psum|psum_scatter|ppermute|pmean|pmax)\b"
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        if re.search(calls, path.read_text())
    }
    assert found == {"exchange.py"}


def test_only_the_command_line_reads_the_environment_or_prints():
    for path in FILES:
        relative = path.relative_to(PACKAGE).as_posix()
        if relative.startswith(("cli", "demo/", "__main__")):
            continue
        cache = relative == "kernels/records.py"  # where a user's cache is
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert name not in ("print", "input", "os.getenv", "exit"), (relative, node.lineno)
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            assert cache or text != "os.environ", (relative, node.lineno)


def test_private_jax_is_used_nowhere():
    private = re.compile(r"\._src\b|(import|from) jaxlib")
    assert private.search("from jax._src import core")
    assert [path for path in FILES if private.search(path.read_text())] == []


WATCHED = """
import sys
import jax, numpy, optax  # their own imports may read files
touched = []

def watch(event, args):
    if event == "open" and set(str(args[1]) or "r") & set("wax+"):
        touched.append((event, *args[:2]))
    if event.startswith(("socket.", "os.mkdir", "os.rename", "subprocess.")):
        touched.append((event, args))

sys.addaudithook(watch)
import pathlib, socket
import dmuon_jax, dmuon_jax.kernels, dmuon_jax.planning
dmuon_jax.dmuon(1e-3, weight_decay=0.1, ns_coeffs="polar_express", method="gram")
dmuon_jax.normuon(1e-3)
assert not touched, touched
pathlib.Path(sys.argv[1]).write_text("")
socket.socket().close()
assert {event for event, *_ in touched} >= {"open", "socket.__new__"}, touched
"""


def test_import_and_construction_write_nothing_and_open_no_socket(tmp_path):
    done = subprocess.run(
        [sys.executable, "-B", "-c", WATCHED, str(tmp_path / "seen")],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
    )
    assert done.returncode == 0, done.stderr
