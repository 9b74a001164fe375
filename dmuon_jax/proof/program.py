"""The text of a compiled program, and the memory it takes."""

from __future__ import annotations

import dataclasses

import jax

from dmuon_jax.proof.hlo import Module, parse


@dataclasses.dataclass(frozen=True)
class Memory:
    """Device memory of one device, bytes."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Arguments, temporaries and those results that reuse no argument."""
        fresh = self.output_bytes - self.alias_bytes
        return self.argument_bytes + fresh + self.temp_bytes


def read_program(
    program: jax.stages.Compiled | jax.stages.Lowered | str,
) -> tuple[Module, Memory | None]:
    """Module and memory of a program; a lowered one is compiled."""
    if isinstance(program, str):
        return parse(program), None
    if isinstance(program, jax.stages.Lowered):
        program = program.compile()
    if not isinstance(program, jax.stages.Compiled):
        kind = type(program).__name__
        raise TypeError(f"program must be compiled, lowered or HLO text, got {kind}")
    stats, text = program.memory_analysis(), program.as_text()
    if text is None:
        raise NotImplementedError("this platform does not show its compiled programs")
    if stats is None:
        return parse(text), None
    memory = Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
    )
    return parse(text), memory
