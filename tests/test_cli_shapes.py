"""Files of ``--shapes``: what is wrong in one is named with its file, place and field."""

import json

import pytest

from tests.test_cli import run

GOOD = {"name": "w", "shape": [4, 4], "count": 4}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": None}, "name must be a text, got None"),
        ({"name": 7}, "name must be a text, got 7"),
        ({"name": ""}, "name must be a text, got ''"),
        ({"shape": [4]}, "shape must be two whole numbers >= 1, got [4]"),
        ({"shape": [4, 4, 4]}, "shape must be two whole numbers"),
        ({"shape": [4, 0]}, "shape must be two whole numbers >= 1, got [4, 0]"),
        ({"shape": [4, 4.0]}, "shape must be two whole numbers"),
        ({"shape": [True, 4]}, "shape must be two whole numbers"),
        ({"shape": "4x4"}, "shape must be two whole numbers >= 1, got '4x4'"),
        ({"shape": 4}, "shape must be two whole numbers"),
        ({"count": "4"}, "count must be a whole number >= 1, a multiple of 1, got '4'"),
        ({"count": -4}, "count must be a whole number"),
        ({"count": 7, "stack": [2]}, "a multiple of 2, got 7"),
        ({"stack": 2}, "stack must be whole numbers >= 1, got 2"),
        ({"stack": [0]}, "stack must be whole numbers >= 1, got [0]"),
        ({"stak": [2]}, "fields must be among name, shape, count, stack, got ['stak']"),
    ],
    ids=str,
)
def test_bad_shapes_are_named(capsys, tmp_path, change, words):
    path = tmp_path / "bad.json"
    other = GOOD | {"name": "other"}
    path.write_text(json.dumps({"matrices": [other, GOOD | change]}))
    code, out, err = run(capsys, "plan", "--shapes", path)
    assert (code, out) == (2, "") and f"error: --shapes {path}: " in err
    assert words in err and "at matrices[1]" in err


@pytest.mark.parametrize("field", ["name", "shape"])
def test_shapes_that_lack_a_field_are_named(capsys, tmp_path, field):
    path = tmp_path / "bad.json"
    record = {name: value for name, value in GOOD.items() if name != field}
    path.write_text(json.dumps({"matrices": [record]}))
    code, _, err = run(capsys, "plan", "--shapes", path)
    assert code == 2 and f"{field} must be" in err and "got none at matrices[0]" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be JSON"),
        ("{", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("3", "an object with a list of matrices, got 3"),
        ("[1]", "an object with a list of matrices, got [1]"),
        ('{"matrix": []}', "an object with a list of matrices"),
        ('{"matrices": []}', "an object with a list of matrices"),
        ('{"matrices": {"name": "w"}}', "an object with a list of matrices"),
        ('{"matrices": ["w"]}', "must be an object, got 'w' at matrices[0]"),
        (json.dumps({"matrices": [GOOD, GOOD]}), "got ['w'] twice"),
    ],
    ids=lambda text: text[:20],
)
def test_files_that_hold_no_shapes_are_named(capsys, tmp_path, text, words):
    path = tmp_path / "bad.json"
    path.write_text(text)
    code, out, err = run(capsys, "plan", "--shapes", path)
    assert (code, out) == (2, "") and f"error: --shapes {path}: " in err and words in err


def test_sizes_may_be_left_to_their_defaults(capsys, tmp_path):
    path = tmp_path / "few.json"
    path.write_text('{"matrices": [{"name": "w", "shape": [8, 4], "stack": [2, 3]}]}')
    code, out, _ = run(capsys, "plan", "--shapes", path)
    assert code == 0 and "6 matrices of 1 leaves" in out
