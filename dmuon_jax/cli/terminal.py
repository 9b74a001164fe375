"""Where commands write: results on stdout, progress and errors on stderr."""

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

PATIENCE_S = 2.0
"""Work that takes longer than this shows that it goes on."""

CODES = {"green": "32", "yellow": "33", "red": "31", "bold": "1"}


class UsageError(ValueError):
    """Arguments that parse but cannot be used; the command exits with 2."""


@dataclasses.dataclass(frozen=True)
class Terminal:
    """What stdout and stderr can show.

    Attributes:
      colors: whether results may be coloured.
      redraws: whether progress may overwrite its line.
    """

    colors: bool
    redraws: bool

    @classmethod
    def here(cls) -> "Terminal":
        """The terminal of this process; no colours in files or with ``NO_COLOR``."""
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        return cls(
            colors=sys.stdout.isatty() and not plain,
            redraws=sys.stderr.isatty() and not plain,
        )

    def paint(self, text: str, color: str) -> str:
        """``text`` in a colour, where colours can be shown."""
        return f"\x1b[{CODES[color]}m{text}\x1b[0m" if self.colors else text

    def print(self, text: str = "") -> None:
        """Writes a result."""
        print(text, flush=True)

    def note(self, text: str, color: str = "") -> None:
        """Writes what is not part of the result, in a colour where those can be shown."""
        if color and self.redraws:
            text = f"\x1b[{CODES[color]}m{text}\x1b[0m"
        print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def logs(self) -> Iterator[None]:
        """Notes what the package logs, progress included."""
        log = logging.getLogger("dmuon_jax")
        handler, level = NoteHandler(self), log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)

    @contextlib.contextmanager
    def waiting(self, what: str, total: int = 0) -> Iterator[Callable[[], None]]:
        """Shows how long ``what`` goes on, once it takes long.

        Args:
          what: what is waited for.
          total: its number of parts, for a bar; 0 where that is not known.

        Yields:
          A function to call after each part.
        """
        over = threading.Event()
        done: list[None] = []
        started = time.perf_counter()

        def tick() -> None:
            if over.wait(PATIENCE_S):
                return
            if not self.redraws:
                self.note(f"{what} ...")
                return
            while True:
                seconds = time.perf_counter() - started
                line = f"{what}{bar(len(done), total)} ... {seconds:.0f} s "
                print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
                if over.wait(1.0):
                    print("\r\x1b[K", end="", file=sys.stderr, flush=True)
                    return

        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield lambda: done.append(None)
        finally:
            over.set()
            ticker.join()


def bar(done: int, total: int, width: int = 20) -> str:
    """How far something is, such as `` [#####---------------] 1/4``; "" without a total."""
    if not total:
        return ""
    filled = width * done // total
    return f" [{'#' * filled}{'-' * (width - filled)}] {done}/{total}"


class NoteHandler(logging.Handler):
    """Writes log records as notes."""

    def __init__(self, terminal: Terminal):
        super().__init__()
        self.terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self.terminal.note(record.getMessage())


def table(rows: list[tuple[str, ...]], indent: str = "  ") -> str:
    """Columns of equal width, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        indent
        + "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
