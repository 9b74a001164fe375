"""Parses the command line, runs one command, and turns errors into sentences."""

import argparse
import os
import sys

from dmuon_jax.cli import (
    audit_command,
    bench_command,
    demo_command,
    doctor_command,
    plan_command,
    simulate_command,
    tune_command,
)
from dmuon_jax.cli.doctor_command import version
from dmuon_jax.cli.terminal import Terminal

COMMANDS = (
    plan_command,
    simulate_command,
    audit_command,
    tune_command,
    bench_command,
    demo_command,
    doctor_command,
)
EXIT_CODES = """exit codes:
  0  done
  1  a check failed, or this machine cannot do it
  2  wrong use
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="dmuon-jax",
        description="Muon at distributed scale: plan it, prove it, measure it.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    versions = [f"{name} {version(name)}" for name in ("dmuon_jax", "jax")]
    parser.add_argument("--version", action="version", version=", ".join(versions))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add_parser(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: arguments; None for those of the process.

    Returns:
      The exit code: 0 done, 1 a check failed or this machine cannot do it, 2 wrong use,
      130 interrupted.
    """
    terminal = Terminal.here()
    arguments = make_parser().parse_args(argv)  # leaves with 2 for wrong use
    try:
        return arguments.run(arguments, terminal)
    except BrokenPipeError:  # what reads the output, as `head` does, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except NotImplementedError as error:
        terminal.note(f"dmuon-jax {arguments.command}: {error}")
        return 1
    except (ValueError, TypeError, OSError) as error:
        terminal.note(f"dmuon-jax {arguments.command}: error: {error}")
        return 2
    except KeyboardInterrupt:
        terminal.note("stopped")
        return 130
