"""The cache of measurements: what it keeps, what it ignores, and what it survives."""

import contextlib
import json
import math
import os
import pathlib
import signal
import stat
import subprocess
import sys
import time
import warnings

import pytest

from dmuon_jax.kernels import records
from dmuon_jax.kernels.records import FORMAT, PARTIAL, Records

KEY = {"device": "a GPU", "shape": [8, 16], "batch": 2}
LIMIT_S = 60


def number(value):
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError(f"it must be a finite number, got {value!r}")
    return value


def read(folder, key=KEY):
    with Records(folder) as kept:
        return kept.read(key, number)


def write(folder, value, key=KEY):
    with Records(folder) as kept:
        kept.write(key, value)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read_by_its_key_alone(tmp_path):
    folder = tmp_path / "new" / "cache"
    assert read(folder) is None
    write(folder, 1.5)
    write(folder, 2.5, KEY | {"batch": 3})
    assert read(folder) == 1.5
    assert read(folder, dict(reversed(KEY.items()))) == 1.5
    assert read(folder, KEY | {"batch": 3}) == 2.5
    assert read(folder, KEY | {"device": "another"}) is None
    write(folder, 3.5)
    assert read(folder) == 3.5 and len(files(folder)) == 2
    assert records.contents(folder) == (
        2,
        sum(p.stat().st_size for p in folder.iterdir()),
    )


def test_only_the_user_may_look(tmp_path):
    before = os.umask(0)
    try:
        write(tmp_path / "a" / "b", 1.5)
    finally:
        os.umask(before)
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = (tmp_path / "a" / "b").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_where_a_users_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert records.default_directory() == tmp_path / "xdg" / "dmuon_jax"
    assert records.cache_directory(True) == tmp_path / "xdg" / "dmuon_jax"
    for ignored in ("relative/folder", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert records.default_directory() == tmp_path / ".cache" / "dmuon_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert records.default_directory() == tmp_path / ".cache" / "dmuon_jax"
    assert records.cache_directory(False) is None
    assert records.cache_directory("~/mine") == tmp_path / "mine"
    with pytest.raises(TypeError, match="cache must be a bool or a path, got 3"):
        records.cache_directory(3)

    def homeless():
        raise RuntimeError("no home")

    monkeypatch.setattr(pathlib.Path, "home", homeless)
    assert records.default_directory() is None
    assert list(tmp_path.iterdir()) == []


def test_turned_off_it_touches_nothing(monkeypatch):
    def touched(*_, **__):
        raise AssertionError("a file was touched")

    monkeypatch.setattr(pathlib.Path, "open", touched)
    monkeypatch.setattr(records, "write_text", touched)
    write(None, 1.5)
    assert read(None) is None
    assert records.contents(None) == (0, 0)


def valid_text():
    return json.dumps({"format": FORMAT, "key": KEY, "value": 1.5}) + "\n"


DAMAGED = {
    "empty": b"",
    "truncated": valid_text()[:-20].encode(),
    "binary": b"\x93NUMPY\x01\x00\xff\xfe",
    "a list": b"[]",
    "future": valid_text().replace("measurement 1", "measurement 2").encode(),
    "another program's": b'{"time_us": 1.5}',
    "another key's": valid_text().replace("a GPU", "B GPU").encode(),
    "no value": valid_text().replace('"value"', '"values"').encode(),
    "not a number": valid_text().replace("1.5", "NaN").encode(),
    "text for a number": valid_text().replace("1.5", '"1.5"').encode(),
    "nested without end": b"[" * 10**5,
    "too long": valid_text().encode() + b" " * records.MAX_BYTES + b"x",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_and_foreign_entries_are_ignored_and_replaced(tmp_path, content):
    path = Records(tmp_path).path(KEY)
    path.write_bytes(content)
    if content == DAMAGED["too long"]:
        assert read(tmp_path) == 1.5  # the rest is never read
        path.write_bytes(b" " * records.MAX_BYTES + content)
    with pytest.warns(UserWarning, match="1 ignored") as caught:
        assert read(tmp_path) is None
    assert len(caught) == 1 and str(tmp_path) in str(caught[0].message)
    write(tmp_path, 2.5)
    assert read(tmp_path) == 2.5


def test_every_truncation_is_seen(tmp_path):
    write(tmp_path, 1.5)
    path = Records(tmp_path).path(KEY)
    whole = path.read_bytes().rstrip()
    with pytest.warns(UserWarning, match=f"{len(whole)} ignored") as caught:
        with Records(tmp_path) as kept:
            for size in range(len(whole)):
                path.write_bytes(whole[:size])
                assert kept.read(KEY, number) is None
    assert len(caught) == 1


def test_a_folder_in_an_entrys_place_is_ignored(tmp_path):
    Records(tmp_path).path(KEY).mkdir()
    with pytest.warns(UserWarning, match="1 ignored .* 1 not kept"):
        with Records(tmp_path) as kept:
            assert kept.read(KEY, number) is None
            kept.write(KEY, 1.5)
    assert not list(tmp_path.glob(f".*{PARTIAL}"))


@pytest.mark.parametrize("step", ["mkstemp", "fsync", "replace"])
def test_a_full_disk_is_said_once_and_loses_nothing(tmp_path, monkeypatch, step):
    write(tmp_path, 1.5)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    module = records.tempfile if step == "mkstemp" else os
    with monkeypatch.context() as patch:
        patch.setattr(module, step, full)
        with pytest.warns(UserWarning, match="2 not kept .*No space left") as caught:
            with Records(tmp_path) as kept:
                kept.write(KEY, 2.5)
                kept.write(KEY | {"batch": 3}, 2.5)
    assert len(caught) == 1
    assert read(tmp_path) == 1.5 and len(files(tmp_path)) == 1


def test_a_home_that_is_no_folder_is_said_once(tmp_path):
    (tmp_path / "home").write_text("")
    with pytest.warns(UserWarning, match="2 not kept"):
        with Records(tmp_path / "home" / "dmuon_jax") as kept:
            assert kept.read(KEY, number) is None
            kept.write(KEY, 1.5)
            kept.write(KEY, 1.5)


@contextlib.contextmanager
def mounted(folder, options):
    """A small file system of its own; skips where that is not allowed."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=LIMIT_S)


def test_a_disk_that_is_really_full(tmp_path):
    with mounted(tmp_path / "disk", "size=16k") as folder:
        keys = [KEY | {"batch": batch} for batch in range(1, 11)]
        with pytest.warns(UserWarning, match="not kept .*No space left") as caught:
            with Records(folder) as kept:
                for key in keys:
                    kept.write(key, 1.5)
        assert len(caught) == 1
        found = [read(folder, key) for key in keys]
        assert 0 < found.count(1.5) < 10 and set(found) == {1.5, None}
        assert not list(folder.glob(f".*{PARTIAL}"))


def test_a_home_that_is_really_read_only(tmp_path):
    with mounted(tmp_path / "home", "size=64k") as folder:
        write(folder, 1.5)
        remount = ["mount", "-o", "remount,ro", str(folder)]
        subprocess.run(remount, check=True, timeout=LIMIT_S)
        with pytest.warns(UserWarning, match="1 not kept .*[Rr]ead-only"):
            write(folder, 2.5)
        assert read(folder) == 1.5


CHILD = """
import sys
from dmuon_jax.kernels.records import Records
def number(value):
    assert isinstance(value, float)
    return value
"""


def start(code, *arguments):
    command = [sys.executable, "-W", "error", "-c", CHILD + code, *map(str, arguments)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipe)


def test_a_limit_on_file_sizes_costs_one_warning(tmp_path):
    code = """
import resource, warnings
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with Records(__import__("pathlib").Path(sys.argv[1])) as kept:
        for batch in range(3):
            kept.write({"batch": batch}, 1.5)
        kept.write({"text": "x" * 200}, 1.5)
print(len(caught), caught[0].message)
"""
    process = start(code, tmp_path)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert out.startswith("1 ") and "1 not kept" in out and "File too large" in out
    assert len(files(tmp_path)) == 3 and read(tmp_path, {"batch": 2}) == 1.5


def test_many_processes_write_and_read_one_folder(tmp_path):
    code = """
import pathlib
folder, own = pathlib.Path(sys.argv[1]), float(sys.argv[2])
keys = [{"batch": batch} for batch in range(8)]
for round in range(25):
    with Records(folder) as kept:
        for key in keys:
            kept.write(key, own)
            found = kept.read(key, number)
            assert found in (0.0, 1.0, 2.0, 3.0), found
"""
    processes = [start(code, tmp_path, i) for i in range(4)]
    try:
        for process in processes:
            _, err = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, err
    finally:
        for process in processes:
            process.kill()
    assert len(files(tmp_path)) == 8
    for batch in range(8):
        assert read(tmp_path, {"batch": batch}) in (0.0, 1.0, 2.0, 3.0)


def test_a_kill_in_the_middle_of_a_write_leaves_a_whole_entry_or_none(tmp_path):
    # Slow writes make it likely, and the leftover certain, that the kill hits one.
    code = """
import os, pathlib, time
real = os.fsync
def slow(handle):
    real(handle)
    print("writing", flush=True)
    time.sleep(0.2)
os.fsync = slow
with Records(pathlib.Path(sys.argv[1])) as kept:
    for round in range(10**6):
        kept.write({"batch": round % 4}, float(round))
"""
    process = start(code, tmp_path)
    for _ in range(3):
        assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)
    (leftover,) = tmp_path.glob(f".*{PARTIAL}")
    assert [read(tmp_path, {"batch": b}) for b in range(4)] == [0.0, 1.0, None, None]
    write(tmp_path, 5.0, {"batch": 2})
    assert leftover.exists()  # it may be another process's
    old = time.time() - records.ABANDONED_S - 1
    os.utime(leftover, (old, old))
    write(tmp_path, 6.0, {"batch": 2})
    assert not leftover.exists() and read(tmp_path, {"batch": 2}) == 6.0


def test_an_error_inside_is_not_hidden_by_a_warning(tmp_path):
    Records(tmp_path).path(KEY).write_text("damaged")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError, match="mine"):
            with Records(tmp_path) as kept:
                kept.read(KEY, number)
                raise KeyError("mine")
