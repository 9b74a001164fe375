"""Checkpoints of the demo's runs, with Orbax."""

import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

from dmuon_jax.demo.text import InputError


@dataclasses.dataclass(frozen=True)
class Store:
    """Keeps the newest checkpoint of each contender in a folder of its own.

    Attributes:
      folder: Where the contenders' folders are.
      every: Steps between checkpoints.
      identity: What a run must agree on to be continued: names and JSON values.
    """

    folder: pathlib.Path
    every: int
    identity: dict[str, Any]

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is written after this many steps."""
        return step % self.every == 0

    def find(self, label: str) -> int | None:
        """Steps done in a contender's checkpoint, ``None`` if there is none.

        Raises:
          InputError: The checkpoint belongs to another run or cannot be read.
        """
        path = self._path(label)
        if not path.is_dir():
            return None
        with ocp.CheckpointManager(path) as manager:
            step = manager.latest_step()
        if step is not None:
            self._check(self._read(label, step, identity=ocp.args.JsonRestore()))
        return step

    def clear(self, label: str) -> bool:
        """Deletes a contender's checkpoints; says whether there were any."""
        existed = self._path(label).is_dir()
        if existed:
            shutil.rmtree(self._path(label))
        return existed

    def save(self, label: str, step: int, arrays: Any, curves: dict[str, Any]) -> None:
        """Writes a checkpoint and removes the contender's older one.

        Args:
          label: The contender.
          step: Steps done.
          arrays: Parameters and optimizer state.
          curves: JSON values that belong to them.
        """
        options = ocp.CheckpointManagerOptions(
            max_to_keep=1, enable_async_checkpointing=False
        )
        with ocp.CheckpointManager(self._path(label), options=options) as manager:
            manager.save(
                step,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardSave(arrays),
                    curves=ocp.args.JsonSave(curves),
                    identity=ocp.args.JsonSave(self.identity),
                ),
            )

    def restore(self, label: str, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads a contender's checkpoint.

        Args:
          label: The contender.
          step: Steps done in it, from ``find``.
          like: Arrays with the structure, shapes, dtypes and shardings to restore to.

        Returns:
          The arrays and the curves as they were saved.

        Raises:
          InputError: The checkpoint cannot be read.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        arrays = self._read(label, step, arrays=ocp.args.StandardRestore(abstract))
        return arrays, self._read(label, step, curves=ocp.args.JsonRestore())

    def _path(self, label: str) -> pathlib.Path:
        return self.folder.absolute() / label

    def _read(self, label: str, step: int, **item: ocp.args.CheckpointArgs) -> Any:
        """Reads the one item that is named."""
        (name,) = item
        path = self._path(label)
        try:
            with ocp.CheckpointManager(path) as manager:
                return manager.restore(step, args=ocp.args.Composite(**item))[name]
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                f"--resume must find a readable checkpoint, got a damaged one "
                f"(in {path / str(step)})."
            ) from error

    def _check(self, saved: dict[str, Any]) -> None:
        names = sorted(self.identity.keys() | saved.keys())
        wrong = [
            f"{name} was {saved.get(name)} and is now {self.identity.get(name)}"
            for name in names
            if saved.get(name) != self.identity.get(name)
        ]
        if wrong:
            raise InputError(
                f"--resume must continue the same run, but {'; '.join(wrong)} "
                f"(in {self.folder})."
            )
