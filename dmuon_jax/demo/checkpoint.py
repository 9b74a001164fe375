"""Checkpoints of the demo's runs, with Orbax."""
