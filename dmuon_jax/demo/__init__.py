"""The demo: AdamW, optax.contrib.muon and dmuon on real text, side by side.

Run it with ``python -m dmuon_jax.demo``. Like the command line, it may print and parse;
nothing else in the package imports it.
"""
