"""Fused weights: each part is a matrix of its own, wherever shard borders lie."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers as Dims

from dmuon_jax import Plan, Split, dmuon, plan_owners
from dmuon_jax.matrices import Piece
from dmuon_jax.split import pieces_of
from tests.layouts import make_mesh
from tests.references import orthogonalized, relative, shape_factor

RULES = {
    "qkv": Split((64, 64, 64)),
    "grouped qkv": Split((32, 8, 8)),
    "gate_up": Split(2),
    "alternating": Split(2, interleaved=True),
    "heads": Split(4, Dims(0, (1, 2))),
    "rows": Split(3, axis="reduction"),
    "stack": Split(2, Dims(1, 2)),
    "transposed": Split((8, 20), Dims(1, 0)),
}
SHAPES = {
    "qkv": ((64, 192), P(None, "x")),  # 48 columns a shard: borders cut the parts
    "grouped qkv": ((16, 48), P("x", None)),
    "gate_up": ((64, 128), P(None, "x")),
    "alternating": ((64, 128), P(None, "x")),
    "heads": ((64, 4, 16), P(None, None, "x")),
    "rows": ((48, 32), P("x", None)),
    "stack": ((3, 16, 48), P(None, "x", None)),
    "transposed": ((28, 16), P("x", None)),
}


def parts(name, x):
    """Views of the matrices of a leaf, written by hand."""
    match name:
        case "qkv":
            return [x[:, i : i + 64] for i in (0, 64, 128)]
        case "grouped qkv":
            return [x[:, :32], x[:, 32:40], x[:, 40:]]
        case "gate_up":
            return [x[:, :64], x[:, 64:]]
        case "alternating":
            return [x[:, ::2], x[:, 1::2]]
        case "heads":
            return [x[:, h] for h in range(4)]
        case "rows":
            return [x[:16], x[16:32], x[32:]]
        case "stack":
            return [m[:, cut] for m in x for cut in (slice(0, 24), slice(24, 48))]
        case "transposed":
            return [x[:8].T, x[8:].T]


def reference(name, x):
    """Each part orthogonalized and scaled on its own."""
    result = np.zeros(x.shape)
    for target, part in zip(parts(name, result), parts(name, x), strict=True):
        target[...] = orthogonalized(part, (0, 1)) * shape_factor(part.shape, (0, 1))
    return result


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_parts_equal_separate_matrices(kind):
    rng = np.random.default_rng(0)
    tree = {k: rng.normal(size=s).astype(np.float32) for k, (s, _) in SHAPES.items()}
    for name, x in tree.items():
        parts(name, x)[0][...] *= 10  # a joint norm would drown the other parts
    mesh = make_mesh((("x", 4),), kind)
    params = {k: jax.device_put(x, NamedSharding(mesh, SHAPES[k][1])) for k, x in tree.items()}
    tx = dmuon(-1.0, muon_weight_dimension_numbers=RULES, method="direct")
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    for name, x in tree.items():
        assert relative(updates[name], reference(name, x)) <= 1e-5, name
        assert updates[name].sharding.is_equivalent_to(params[name].sharding, x.ndim)


def test_pieces_cover_each_entry_once():
    for name, rule in RULES.items():
        shape = SHAPES[name][0]
        pieces = pieces_of(rule, shape, name)
        rows = [p.start + i * p.stride for p in pieces for i in range(p.size)]
        assert sorted(rows) == list(range(len(rows)))
    assert pieces_of(Split(2, interleaved=True), (4, 6), "x") == (
        Piece(1, 0, 3, 2),
        Piece(1, 1, 3, 2),
    )


def test_a_plan_with_splits_survives_json():
    params = {"qkv": np.zeros((8, 24), np.float32)}
    plan = plan_owners(params, muon_weight_dimension_numbers={"qkv": Split((8, 8, 8))})
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.num_matrices == 3
    other = dmuon(0.1, plan=plan, muon_weight_dimension_numbers={"qkv": Split((16, 8))})
    with pytest.raises(ValueError, match="splits the matrices otherwise"):
        other.init(params)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((3, 4),), "add up to the output dimension 8, got"),
        ((3,), "divide the output dimension 8, got 3"),
    ],
)
def test_parts_must_fit(arguments, words):
    tx = dmuon(0.1, muon_weight_dimension_numbers={"w": Split(*arguments)})
    with pytest.raises(ValueError, match=words):
        tx.init({"w": np.zeros((4, 8), np.float32)})


@pytest.mark.parametrize("parts", [0, (), (4, -1), (2.5,), 2.0])
def test_parts_must_be_positive_integers(parts):
    with pytest.raises(ValueError, match="positive integers"):
        Split(parts)


def test_unequal_parts_cannot_alternate():
    with pytest.raises(ValueError, match="must be a number"):
        Split((4, 4), interleaved=True)
