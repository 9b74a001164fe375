"""``python -m dmuon_jax``: the same as the command ``dmuon-jax``."""

import sys

from dmuon_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
