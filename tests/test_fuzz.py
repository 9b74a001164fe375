"""Random input: every outcome is a right update or a clear error. See ``tests.fuzz``."""

import inspect
import json
import math
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from dmuon_jax import Plan, Split, dmuon, plan_owners
from dmuon_jax.planning.plan import FORMAT
from dmuon_jax.planning.report import ITEMSIZE
from tests import fuzz

CLEAR = (ValueError, TypeError, NotImplementedError)


@pytest.mark.parametrize("seed", range(10))
def test_parcels_return_bit_for_bit(seed):
    tree = fuzz.random_tree(seed)
    assert fuzz.round_trip(tree, "float16" if seed % 2 else None) == []


def test_the_random_trees_hold_every_kind():
    trees = [fuzz.random_tree(seed) for seed in range(10)]
    cases = [case for tree in trees for case in tree.cases]
    assert len(cases) == 250
    assert {tree.devices.axis_types[0] for tree in trees} >= {
        AxisType.Auto,
        AxisType.Explicit,
    }
    assert len({tree.mesh for tree in trees}) >= 5
    assert sum(isinstance(case.rule, Split) for case in cases) > 20
    assert sum(case.spec_in != case.spec_out for case in cases) > 50
    assert {len(case.shape) for case in cases} == {2, 3, 4}


@pytest.mark.parametrize(("seed", "method"), [(100, "direct"), (101, "gram")])
def test_updates_equal_numpy(seed, method):
    assert fuzz.update(fuzz.random_tree(seed, 12), method) == []


def spoiled(rng, case, mesh):
    """A case that cannot be updated, as (shape, rule, spec, dtype)."""
    shape, spec, dtype = case.shape, P(), np.float32
    dims = case.rule if isinstance(case.rule, Dims) else case.rule.dimension_numbers
    rule, ndim = dims, len(shape)
    match rng.randrange(8):
        case 0:
            rule = Dims(dims.reduction_axis, (ndim + rng.randint(0, 3),))
        case 1:
            rule = Dims(dims.reduction_axis, dims.reduction_axis)
        case 2:
            rule = Dims((), dims.output_axis)
        case 3:
            spec = P(*(None,) * ndim, mesh.axis_names[0])
        case 4:
            shape = tuple(n * 5 + 1 for n in shape)
            size = int(np.prod(mesh.devices.shape))
            shape = tuple(n + 1 if n % size == 0 else n for n in shape)
            spec = P(*(None,) * (ndim - 1), mesh.axis_names)
        case 5:
            dtype = rng.choice([np.int32, np.bool_, np.uint8])
        case 6:
            parts = (10**6, 1) if rng.random() < 0.5 else 10**6 + 1
            rule = Split(parts, dims)
        case 7:
            shape, rule = (shape[0],), Dims()
    return shape, rule, spec, dtype


@pytest.mark.parametrize("seed", range(5))
def test_bad_leaves_are_refused_by_name(seed):
    """Random leaves that cannot be updated.

    Fault: a leaf has axes, a split, a dtype or a sharding that cannot be
    Happens: planning raises ValueError, TypeError or NotImplementedError that names
      the leaf
    Kept: nothing has run
    """
    rng = random.Random(seed)
    tree = fuzz.random_tree(seed)
    for _ in range(40):
        case = fuzz.random_case(rng, tree.mesh)
        shape, rule, spec, dtype = spoiled(rng, case, tree.devices)
        params = {"good": jax.ShapeDtypeStruct((8, 24), np.float32)}
        params["bad"] = jax.ShapeDtypeStruct(shape, dtype)
        rules = {"good": Dims(), "bad": rule}
        shardings = {
            "good": NamedSharding(tree.devices, P()),
            "bad": NamedSharding(tree.devices, spec),
        }
        with pytest.raises(CLEAR, match=r"at \['bad'\]"):
            plan_owners(
                params, param_shardings=shardings, muon_weight_dimension_numbers=rules
            )


JUNK = (
    None, True, -1, 0, 1, 3, 40, 0.5, -0.5, math.nan, math.inf, "", "direct", "float16",
    "x", b"x", (), (1,), (1, 2, 3), ("x",), ((1.0, 2.0),), {}, {"w": None}, {1}, object(),
    np.float32(0.25), np.ones(3), np.ones((2, 3)), np.array("x"), jnp.ones(()), jnp.int32(2),
    P("x"), Dims(), np.float16, jnp.bfloat16, complex(1, 2), lambda *_: None, range(3),
)  # fmt: skip


def outcome(name, value, params, gradient):
    """Builds, inits and traces an update; returns the update's types or the error."""
    try:
        arguments = {"learning_rate": 0.1, name: value}
        tx = dmuon(**arguments)
        state = tx.init(params)
        return jax.eval_shape(tx.update, gradient, state, params)[0]
    except CLEAR as error:
        return error


@pytest.mark.parametrize("name", inspect.signature(dmuon).parameters)
def test_any_argument_of_any_kind(name):
    """Junk in every argument.

    Fault: an argument of `dmuon` has a wrong kind or value
    Happens: ValueError, TypeError or NotImplementedError at construction or `init`
    Kept: nothing has run
    """
    params = {"w": jnp.ones((4, 6)), "b": jnp.ones(3)}
    for value in JUNK:
        found = outcome(name, value, params, params)
        if isinstance(found, CLEAR):
            assert len(str(found)) > 10, (value, found)
            continue
        assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(
            lambda x: (x.shape, x.dtype), params
        ), value


def mutations(text, rng):
    """A plan's text damaged in one place."""
    at = rng.randrange(len(text))
    yield text[:at]
    yield text[:at] + rng.choice('0123456789"[]{},:-') + text[at + 1 :]
    yield text[:at] + text[at + rng.randint(1, 5) :]
    end = rng.randrange(at, min(len(text), at + 30))
    yield text[:at] + text[at:end] * 2 + text[end:]


def test_damaged_plans_are_refused_or_harmless():
    """A plan changed in one place.

    Fault: a plan file is cut short or damaged
    Happens: `Plan.from_json` raises ValueError, or `init` does where the plan no
      longer fits the tree
    Kept: nothing has run; a plan that is still valid gives right updates
    """
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    params = {
        "w": jax.ShapeDtypeStruct(
            (16, 8), np.float32, sharding=NamedSharding(mesh, P("b"))
        ),
        "v": jax.ShapeDtypeStruct(
            (6, 9), np.float32, sharding=NamedSharding(mesh, P())
        ),
    }
    plan = plan_owners(params)
    text, rng = plan.to_json(), random.Random(0)
    refused = 0
    for _ in range(150):
        for damaged in mutations(text, rng):
            try:
                found = Plan.from_json(damaged)
                # What is left is a plan: of this tree, or refused for it.
                jax.eval_shape(dmuon(0.1, plan=found).init, params)
            except CLEAR:
                refused += 1
    assert refused > 300


def places(value, path=()):
    """The path of every value in JSON data."""
    yield path
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from places(value[key], (*path, key))


WRONG = (None, -1, 0, 3, 10**30, 1.5, True, "x", [], {}, [-1], ["x"], math.nan, math.inf)


def test_plans_with_junk_anywhere_are_refused_or_harmless():
    """Every value of a plan in turn is replaced by values of other kinds.

    Fault: a plan file holds a value of another type or out of range
    Happens: `Plan.from_json` raises ValueError and names its place and what it must be
    Kept: nothing has run
    """
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    params = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for name, shape, spec in (("w", (16, 8), P("b")), ("v", (6, 9), P()))
    }
    rules = {"w": Split(2), "v": Split((4, 5))}
    options = dict(muon_weight_dimension_numbers=rules)
    data = json.loads(plan_owners(params, **options).to_json())
    rng, refused, harmless = random.Random(0), 0, set()
    for path in list(places(data))[1:]:
        for junk in rng.sample(WRONG, 4):
            spoiled_data = json.loads(json.dumps(data))
            holder = spoiled_data
            for key in path[:-1]:
                holder = holder[key]
            if json.dumps(holder[path[-1]]) == json.dumps(junk):
                continue
            holder[path[-1]] = junk
            try:
                plan = Plan.from_json(json.dumps(spoiled_data))
                assert plan.summary() and hash(plan)
                jax.eval_shape(dmuon(0.1, plan=plan, **options).init, params)
            except ValueError:
                refused += 1
                continue
            harmless.add(next(key for key in reversed(path) if isinstance(key, str)))
    assert refused > 600
    # Times, words, which of two equal branches a device takes, and specs: a trace hides
    # those of the arrays, so that only an eager init can compare.
    times = {"exchange_us", "gap", "lower_bound_us", "owner_load_us"}
    words = {"status", "bounded", "padded", "branch_of", "format", "buffer"}
    assert harmless <= times | words | {"spec_in", "spec_out"}


def plan_data():
    """A plan with several groups, parts, members and branches, as JSON data."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    trees = [("w", (16, 8), P("b"), np.float32), ("v", (6, 9), P(), np.float16)]
    trees += [("u", (3, 8, 4), P(), np.float32), ("c", (8, 4), P("a"), np.complex64)]
    params = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for name, shape, spec, dtype in trees
    }
    rules = {"w": Split(2), "v": Split((4, 5)), "u": Dims(-2, -1), "c": Dims()}
    options = dict(muon_weight_dimension_numbers=rules)
    plan = plan_owners(params, owner_axes="auto", **options)
    assert len(plan.groups) > 2 and plan.alternatives
    return json.loads(plan.to_json())


def at(data, path):
    for key in path:
        data = data[key]
    return data


def changed(data, path, value):
    """A copy of JSON data with another value at ``path``."""
    copy = json.loads(json.dumps(data))
    at(copy, path[:-1])[path[-1]] = value
    return json.dumps(copy)


def test_lists_of_a_plan_with_an_entry_too_many_or_too_few():
    """Each list of a plan in turn loses entries, or has one twice.

    Fault: a list in a plan file lacks an entry, has one twice, or is empty
    Happens: `Plan.from_json` raises ValueError that says the rule and what was got
    Kept: nothing has run
    """
    data, seen = plan_data(), set()
    for path in list(places(data))[1:]:
        old = at(data, path)
        if not isinstance(old, list):
            continue
        name = next(key for key in reversed(path) if isinstance(key, str))
        for new in ([], old[:-1], old + old[-1:], old + old[:1], old[1:] + old[-1:]):
            if new == old:
                continue
            try:
                Plan.from_json(changed(data, path, new))
            except ValueError as error:
                assert " must " in str(error), (path, new, error)
            else:
                seen.add(name)
    # Specs are compared with the arrays' own, loads and alternatives are only told, and a
    # branch may be no device's.
    told = {"owner_load_us", "alternatives", "owner_axes"}
    assert seen <= {"spec_in", "spec_out", "branches"} | told


@pytest.mark.parametrize(
    ("part", "field", "words"),
    [
        ("groups", "leaves", "a group must hold leaves, got none in groups"),
        ("buckets", "members", "a bucket must have members, got none in buckets"),
    ],
)
def test_a_group_or_bucket_of_nothing_is_named(part, field, words):
    data = plan_data()
    for item in data[part]:
        text = changed(data, (part,), [*data[part], {**item, field: []}])
        with pytest.raises(ValueError, match=rf"{words}\[{len(data[part])}\]"):
            Plan.from_json(text)


def test_axes_of_a_plan_are_axes_of_its_mesh():
    data = plan_data()
    lists = [("owner_axes",), *(("alternatives", i, "owner_axes") for i in range(2))]
    for path in lists[: 1 + len(data["alternatives"])]:
        for axes in (["a", "a"], ["a", "b", "a"], ["q"], ["a", "q"], [""], ["A"]):
            words = r"owner_axes must be distinct axes of \('a', 'b'\), got \('"
            with pytest.raises(ValueError, match=words):
                Plan.from_json(changed(data, path, axes))


def test_dtypes_of_a_plan_fit_its_leaves():
    """Complex matrices travel and are iterated as they are, real ones in a real dtype."""
    data = plan_data()
    kinds = {"groups": "exchange_dtype", "buckets": "compute_dtype"}
    for part, name in kinds.items():
        for number, item in enumerate(data[part]):
            own = item[name]
            for dtype in ITEMSIZE:
                text = changed(data, (part, number, name), dtype)
                fits = dtype == own if own == "complex64" else "complex" not in dtype
                if fits:
                    Plan.from_json(text)
                    continue
                words = f"{name} must be .* leaves, got {dtype} (for|in the bucket of)"
                with pytest.raises(ValueError, match=words):
                    Plan.from_json(text)


def test_what_a_bucket_misses_is_named():
    data = plan_data()
    for number, bucket in enumerate(data["buckets"]):
        members = bucket["members"]
        for place, member in enumerate(members):
            name = str((member["group"], member["part"], member["piece"]))
            rest = members[:place] + members[place + 1 :]
            lost = {**member, "piece": 77}
            for new, words in (
                (rest, f"none of {name}"),
                ([*members, member], f"more than one of {name}"),
                ([*rest, lost], f"none of {name} and the unknown {name[:-2]}77)"),
            ):
                text = changed(data, ("buckets", number, "members"), new)
                with pytest.raises(ValueError, match=re.escape(words) + "$"):
                    Plan.from_json(text)


@pytest.mark.parametrize("text", [None, b"{}", bytearray(b"{}"), 3, {}, []], ids=repr)
def test_only_text_is_json(text):
    with pytest.raises(TypeError, match=f"must be JSON text, got {type(text).__name__}"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "JSON"),
        ("null", f"format {FORMAT}, got 'NoneType'"),
        ("[]", f"format {FORMAT}, got 'list'"),
        ("{}", f"format {FORMAT}, got None"),
        (f'{{"format": {FORMAT + 1}}}', f"format {FORMAT}, got {FORMAT + 1}"),
        (f'{{"format": {FORMAT}}}', "fields of Plan"),
        (f'{{"format": {FORMAT}, "mesh": 3}}', "fields of Plan"),
        ("__import__('os').abort()", "JSON"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_foreign_and_future_plans_are_refused(text, words):
    """Read as data, never executed.

    Fault: a plan file is of another program or of a newer version
    Happens: `Plan.from_json` raises ValueError and names the format found
    Kept: nothing has run
    """
    with pytest.raises(ValueError, match=words):
        Plan.from_json(text)
