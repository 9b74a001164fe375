"""The command line: ``dmuon-jax`` and ``python -m dmuon_jax``."""

from dmuon_jax.cli.main import main

__all__ = ["main"]
