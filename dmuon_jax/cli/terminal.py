"""Where commands write: results on stdout, progress and errors on stderr."""

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

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

    def note(self, text: str) -> None:
        """Writes what is not part of the result."""
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
    def waiting(self, what: str) -> Iterator[None]:
        """Says every second how long ``what`` goes on, once it takes long."""
        done = threading.Event()
        started = time.perf_counter()

        def tick() -> None:
            if done.wait(PATIENCE_S):
                return
            if not self.redraws:
                self.note(f"{what} ...")
                return
            while True:
                seconds = time.perf_counter() - started
                print(f"\r{what} ... {seconds:.0f} s ", end="", file=sys.stderr)
                sys.stderr.flush()
                if done.wait(1.0):
                    print("\r\x1b[K", end="", file=sys.stderr, flush=True)
                    return

        ticker = threading.Thread(target=tick, daemon=True)
        ticker.start()
        try:
            yield
        finally:
            done.set()
            ticker.join()


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
