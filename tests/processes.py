"""Starts several JAX processes on this machine, and ends them whatever happens."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

LIMIT_S = 150.0
"""No test waits longer than this for its processes."""

PATIENCE_S = 20.0
"""How long the others may run on once one process has failed."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one process ended.

    Attributes:
      code: exit code; negative: the signal that ended it.
      text: its output and errors.
    """

    code: int
    text: str

    def json(self) -> dict:
        """The last line of its output."""
        lines = [x for x in self.text.splitlines() if x.startswith("{")]
        return json.loads(lines[-1])


def run_processes(
    count: int, task: str, folder: pathlib.Path, **arguments
) -> list[Outcome]:
    """Runs ``tests.worker``'s task in ``count`` processes with 2 devices each.

    Args:
      count: number of processes; 1 runs without ``jax.distributed``.
      task: name of the task.
      folder: where outputs are kept.
      **arguments: JSON values for the task.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    folder.mkdir(parents=True, exist_ok=True)
    processes, outputs = [], []
    for index in range(count):
        setup = {"count": count, "index": index, "address": address, **arguments}
        output = open(folder / f"output-{index}.txt", "w+")
        outputs.append(output)
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "PYTHONHASHSEED": str(index + 1),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.worker", task, json.dumps(setup)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
            )
        )
    try:
        wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [collect(*pair) for pair in zip(processes, outputs, strict=True)]


def wait(processes) -> None:
    """Returns when all have ended, or some time after one has failed or all are late."""
    deadline = time.monotonic() + LIMIT_S
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        if any(p.poll() for p in processes):
            deadline = min(deadline, time.monotonic() + PATIENCE_S)
        time.sleep(0.05)


def collect(process, output) -> Outcome:
    with output:
        output.seek(0)
        return Outcome(process.returncode, output.read())
