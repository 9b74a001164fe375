"""Real text as bytes: where it comes from and how batches are drawn from it."""

import dataclasses
import hashlib
import pathlib
import sysconfig

import numpy as np

MAX_CORPUS_BYTES = 32 * 2**20
NUM_BLOCKS = 100
HELD_OUT_EVERY = 10
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests"})


class InputError(ValueError):
    """Something the user gave cannot be used; the message is one whole sentence."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as two uint8 arrays, one to train on and one that is never trained on.

    Attributes:
      name: What the text is, for people.
      train: Bytes to draw training windows from.
      held_out: Bytes to draw evaluation windows from.
      digest: Hexadecimal digest of all bytes, to recognise the text again.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray
    digest: str

    @property
    def num_bytes(self) -> int:
        """Bytes of both parts."""
        return self.train.nbytes + self.held_out.nbytes


def load_corpus(path: pathlib.Path | None, window: int) -> Corpus:
    """Reads a file, the files of a folder, or the standard library's ``.py`` files.

    The text is cut into 100 equal blocks and every tenth is held out, so that both
    parts come from everywhere in it.

    Args:
      path: A file or a folder; ``None`` is the standard library of this Python.
      window: Bytes of one training window; both parts must hold at least one.

    Raises:
      InputError: The path does not exist, cannot be read, holds no text or too little.
    """
    name = "Python's standard library" if path is None else str(path)
    files = standard_library_files() if path is None else text_files(path)
    chunks, size = [], 0
    for file in files:
        try:
            chunk = file.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}.") from error
        if b"\0" in chunk:
            continue  # Not text.
        chunks.append(chunk)
        size += len(chunk)
        if size >= MAX_CORPUS_BYTES:
            break
    data = np.frombuffer(b"".join(chunks), np.uint8)[:MAX_CORPUS_BYTES]
    block = len(data) // NUM_BLOCKS
    held_out_bytes = block * (NUM_BLOCKS // HELD_OUT_EVERY)
    if held_out_bytes <= window:
        needed = (window // (NUM_BLOCKS // HELD_OUT_EVERY) + 1) * NUM_BLOCKS
        raise InputError(
            f"the text must have at least {needed} bytes for windows of {window}, "
            f"got {len(data)} (in {name})."
        )
    blocks = data[: block * NUM_BLOCKS].reshape(NUM_BLOCKS, block)
    is_held_out = np.arange(NUM_BLOCKS) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return Corpus(
        name=f"{name}, {len(chunks)} file{'s' * (len(chunks) != 1)}",
        train=blocks[~is_held_out].reshape(-1),
        held_out=blocks[is_held_out].reshape(-1),
        digest=hashlib.sha256(data.tobytes()).hexdigest(),
    )


def standard_library_files() -> list[pathlib.Path]:
    """The running Python's own ``.py`` files, without its tests, in a fixed order."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"))
    return [
        file
        for file in files
        if not SKIPPED_FOLDERS.intersection(file.relative_to(root).parts)
    ]


def text_files(path: pathlib.Path) -> list[pathlib.Path]:
    """The file itself, or every visible file below a folder in a fixed order."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"--data must name a file or a folder, got {path}.")
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise InputError(f"--data must name a folder with files in it, got {path}.")
    return files


def draw_batch(
    data: np.ndarray, seed: int, step: int, batch_size: int, window: int
) -> np.ndarray:
    """Windows at random places: int32 ``[batch_size, window]``.

    A function of its arguments alone, so a resumed run draws what the uninterrupted one
    would have drawn.
    """
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(data) - window + 1, size=batch_size)
    return data[starts[:, None] + np.arange(window)].astype(np.int32)
