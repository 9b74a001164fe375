"""What a compiled program does, read from its text: no devices needed."""

from dmuon_jax.proof.audit import Audit, audit
from dmuon_jax.proof.checks import AuditError
from dmuon_jax.proof.collective import Collective, collectives
from dmuon_jax.proof.flops import Flops, dot_flops
from dmuon_jax.proof.hlo import Module, parse
from dmuon_jax.proof.streams import simulate_streams
from dmuon_jax.proof.timeline import Timeline

__all__ = [
    "Audit",
    "AuditError",
    "Collective",
    "Flops",
    "Module",
    "Timeline",
    "audit",
    "collectives",
    "dot_flops",
    "parse",
    "simulate_streams",
]
