"""``dmuon-jax demo``: trains with three optimizers on virtual devices."""

import argparse

from dmuon_jax.cli.terminal import Terminal, UsageError


def add_parser(commands) -> None:
    """Adds the command to the parser; its arguments are the demo's own."""
    parser = commands.add_parser(
        "demo",
        help="train with AdamW, optax.contrib.muon and dmuon on virtual devices",
        add_help=False,
        prefix_chars="\0",
        allow_abbrev=False,
    )
    parser.add_argument("rest", nargs="*")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, terminal: Terminal) -> int:
    """Runs the command."""
    del terminal  # the demo writes by itself
    try:
        from dmuon_jax.demo.__main__ import main
    except ModuleNotFoundError as error:
        raise UsageError(
            f"demo needs {error.name}: pip install 'dmuon_jax[demo]'"
        ) from error
    return main(arguments.rest)
