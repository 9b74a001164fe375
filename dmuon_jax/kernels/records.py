"""Measurements kept for later runs: a small JSON file for each, in a folder of the user's.

A file is named by a hash of its key, and appears whole or not at all, so that any number
of processes may read and write one folder without locks: two that measured the same write
the same file, and the later one stays. What cannot be read, or is not what it should be,
is as good as not there, and what cannot be written is not kept; either is said once.

`default_directory` is the one place outside the command line that reads the environment.
"""

import hashlib
import json
import os
import pathlib
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

FORMAT = "dmuon_jax measurement 1"
MAX_BYTES = 2**20
"""No entry is longer; of a longer file only the beginning is read, and refused."""

PARTIAL = ".partial"
ABANDONED_S = 3600.0
"""Age at which an unfinished file is taken for that of a process that was killed."""

Cache = bool | str | os.PathLike[str]
"""True: `default_directory`; False: nothing is kept; else the folder."""

Value = TypeVar("Value")


def default_directory() -> pathlib.Path | None:
    """``$XDG_CACHE_HOME/dmuon_jax``, or ``~/.cache/dmuon_jax``; None without a home.

    As the XDG Base Directory Specification says: a relative ``XDG_CACHE_HOME`` is ignored.
    """
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = pathlib.Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "dmuon_jax"


def cache_directory(cache: Cache) -> pathlib.Path | None:
    """The folder that an argument ``cache=`` names; None where nothing is to be kept.

    Raises:
      TypeError: *cache* is neither a bool nor a path.
    """
    if isinstance(cache, bool):
        return default_directory() if cache else None
    if not isinstance(cache, str | os.PathLike):
        raise TypeError(f"cache must be a bool or a path, got {cache!r}")
    return pathlib.Path(cache).expanduser()


def make_private(directory: pathlib.Path) -> None:
    """Creates *directory* and what is missing above it, for this user only."""
    for each in (*reversed(directory.parents), directory):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes the file *path*, whole or not at all, whoever else writes it.

    Raises:
      OSError: It could not be written; what was there before is there still.
    """
    make_private(path.parent)
    handle, name = tempfile.mkstemp(prefix=".", suffix=PARTIAL, dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise


def read_text(path: pathlib.Path) -> str | None:
    """The first `MAX_BYTES` of the file *path*; None where there is none.

    Raises:
      OSError, UnicodeDecodeError: It is there, but cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None


class Records:
    """Entries of one folder, as a context that says at its end what went wrong.

    Attributes:
      directory: The folder; None: nothing is found and nothing kept.
      unread: Entries that were ignored, with the reasons.
      unwritten: Entries that could not be kept, with the reasons.
    """

    def __init__(self, directory: pathlib.Path | None):
        self.directory = directory
        self.unread: list[str] = []
        self.unwritten: list[str] = []

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        found = []
        if self.unread:
            found.append(f"{len(self.unread)} ignored ({self.unread[0]})")
        if self.unwritten:
            found.append(f"{len(self.unwritten)} not kept ({self.unwritten[0]})")
        if found and kind is None:
            warnings.warn(
                f"measurements in {self.directory}: {', '.join(found)}", stacklevel=3
            )

    def path(self, key: Mapping[str, Any]) -> pathlib.Path:
        """The file of *key*."""
        if self.directory is None:
            raise ValueError("directory must be a folder to have files, got None")
        name = hashlib.sha256(canonical(key).encode()).hexdigest()[:32]
        return pathlib.Path(self.directory or "") / f"{name}.json"

    def read(
        self, key: Mapping[str, Any], parse: Callable[[Any], Value]
    ) -> Value | None:
        """What *parse* makes of the value kept for *key*; None where there is none.

        Args:
          key: JSON values by name.
          parse: Raises ValueError or TypeError for a value that cannot be right.
        """
        if self.directory is None:
            return None
        path = self.path(key)
        try:
            text = read_text(path)
            return None if text is None else parse(value_of(text, key))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            self.unread.append(f"{path.name}: {error}")
            return None

    def write(self, key: Mapping[str, Any], value: Any) -> None:
        """Keeps a JSON *value* for *key*."""
        if self.directory is None:
            return
        path = self.path(key)
        content = {"format": FORMAT, "key": dict(key), "value": value}
        try:
            write_text(path, json.dumps(content) + "\n")
            sweep(self.directory)
        except OSError as error:
            self.unwritten.append(str(error))


def value_of(text: str, key: Mapping[str, Any]) -> Any:
    """The value in the text of an entry.

    Raises:
      ValueError: It is damaged, of another format, or another key's.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"it must be of format {FORMAT!r}")
    if canonical(content.get("key")) != canonical(key) or "value" not in content:
        raise ValueError("it must hold its own key and a value")
    return content["value"]


def canonical(key: Any) -> str:
    """*key* as text that is equal for equal keys."""
    return json.dumps(key, sort_keys=True)


def sweep(directory: pathlib.Path) -> None:
    """Removes what killed processes left unfinished."""
    for path in directory.glob(f".*{PARTIAL}"):
        try:
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()
        except OSError:
            pass  # another process removed or finished it


def can_be_written(directory: pathlib.Path) -> bool:
    """Whether files can be kept in *directory*, which need not exist yet."""
    there = next(each for each in (directory, *directory.parents) if each.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def contents(directory: pathlib.Path | None) -> tuple[int, int]:
    """How many entries *directory* holds, and their bytes in all."""
    sizes = []
    if directory is not None:
        for path in directory.glob("*.json"):
            try:
                sizes.append(path.stat().st_size)
            except OSError:
                pass  # removed meanwhile, or not ours to see
    return len(sizes), sum(sizes)
