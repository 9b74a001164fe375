"""Stand-in until the real audit is merged."""
import re
import types


def audit(compiled):
    ops = re.findall(
        r"= .* (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\(",
        compiled.as_text(),
    )
    return types.SimpleNamespace(collectives=len(ops), collective_bytes=0)
