"""Routes of ``hidden_matrices`` against answers written by hand, and the report."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers

from dmuon_jax import HiddenMatrices, dmuon, hidden_matrices, routing_report
from tests import routing_trees

Dims = MuonDimensionNumbers


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def decided(params, rule=hidden_matrices):
    """Dimension numbers by path; fails if one leaf is refused."""
    decisions = rule.explain(params)
    assert not [d.reason for d in decisions.values() if not d.is_decided]
    return {path: d.dims for path, d in decisions.items()}


@pytest.mark.parametrize("name", routing_trees.BY_NAME)
def test_trees_by_hand(name):
    tree = routing_trees.BY_NAME[name]
    assert decided(routing_trees.shapes(tree)) == routing_trees.answers(tree)


def test_equinox_stack_without_biases_needs_out_in():
    tree = routing_trees.EQUINOX_STACKED
    params = routing_trees.shapes(tree)
    with pytest.raises(ValueError) as error:
        hidden_matrices(params)
    ways = (
        "reduction [1], output [2], batch [0] or reduction [2], output [1], batch [0]"
    )
    assert str(error.value).count(ways) == 3
    assert decided(params, HiddenMatrices(out_in=True)) == routing_trees.answers(tree)
    square = decided({"linear": {"weight": spec(8, 8)}})
    assert square == {"['linear']['weight']": Dims(0, 1)}


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(4, qkv_features=24)(nn.LayerNorm()(x))
        y = nn.Dense(40)(nn.RMSNorm()(x))
        return x + nn.Dense(16)(y), None


class LinenModel(nn.Module):
    axis: int | None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(50, 16)(tokens)
        if self.axis is None:
            x, _ = LinenBlock()(x, None)
        else:
            axes = {"params": self.axis}
            block = nn.scan(LinenBlock, axes, split_rngs={"params": True}, length=3)
            x, _ = block(name="layers")(x, None)
        return nn.Dense(50, name="lm_head")(nn.LayerNorm()(x))


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_linen_transformer(axis):
    tokens = spec(2, 8, dtype=jnp.int32)
    params = jax.eval_shape(LinenModel(axis).init, jax.random.key(0), tokens)
    plain = jax.eval_shape(LinenModel(None).init, jax.random.key(0), tokens)
    found = decided(params)
    matrices = {path: dims for path, dims in found.items() if dims is not None}
    assert len(matrices) == 6 and all("kernel" in path for path in matrices)
    for path, dims in matrices.items():
        name = path.replace("['layers']", "['LinenBlock_0']")
        shape = jax.tree.reduce(
            lambda acc, x: acc, shape_at(plain, name), is_leaf=lambda x: True
        )
        base = expected_axes(name, shape)
        assert dims == (base if axis is None else insert_axis(base, axis, len(shape)))


def shape_at(tree, path):
    """The shape of a leaf by path."""
    items = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p): x.shape for p, x in items}[path]


def expected_axes(path, shape):
    """Dimension numbers of one layer's kernel."""
    if "['out']" in path:
        return Dims((0, 1), 2)
    return Dims(0, (1, 2)) if len(shape) == 3 else Dims(0, 1)


def insert_axis(dims, axis, ndim):
    """``dims`` after a layer axis came in at ``axis``."""
    position = axis % (ndim + 1)

    def move(axes):
        if isinstance(axes, tuple):
            return tuple(move(a) for a in axes)
        return axes + (axes >= position)

    return Dims(*(move(axes) for axes in dims))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 16, 24, rngs=rngs, decode=False)
        self.mlp = nnx.List(
            [nnx.Linear(16, 40, rngs=rngs), nnx.Linear(40, 16, rngs=rngs)]
        )


class NnxModel(nnx.Module):
    def __init__(self, rngs, num_layers):
        self.embed = nnx.Embed(50, 16, rngs=rngs)
        make = nnx.vmap(NnxBlock, in_axes=0, out_axes=0, axis_size=num_layers)
        self.layers = make(rngs.split(num_layers))
        self.lm_head = nnx.Linear(16, 50, rngs=rngs)


def test_nnx_state_and_pure_dict():
    model = nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0), 3))
    state = nnx.state(model, nnx.Param)
    found = decided(state)
    answers = {
        "['layers']['attention']['key']['kernel']": Dims(1, (2, 3)),
        "['layers']['attention']['out']['kernel']": Dims((1, 2), 3),
        "['layers']['attention']['query']['kernel']": Dims(1, (2, 3)),
        "['layers']['attention']['value']['kernel']": Dims(1, (2, 3)),
        "['layers']['mlp'][0]['kernel']": Dims(1, 2),
        "['layers']['mlp'][1]['kernel']": Dims(1, 2),
    }
    assert {path: d for path, d in found.items() if d is not None} == answers
    assert decided(nnx.to_pure_dict(state)) == found
    tree = hidden_matrices(state)
    assert tree["layers"]["mlp"][1]["kernel"].get_value() == Dims(1, 2)


def test_what_cannot_be_decided_is_refused_at_once():
    params = {
        "alone": {"kernel": spec(4, 32, 64)},
        "mystery": spec(8, 8),
        "mlp": {"gate": {"kernel": spec(8, 16)}},
        "moe": {"gate": {"kernel": spec(8, 16)}, "up": spec(4, 8, 16)},
        "conv_out": {"c_attn": {"kernel": spec(24, 8), "bias": spec(24)}},
        "sure": {"kernel": spec(8, 16)},
    }
    with pytest.raises(ValueError) as error:
        hidden_matrices(params)
    lines = str(error.value).split("\n")[1:]
    assert [line.split("'")[1] for line in lines] == [
        "alone",
        "conv_out",
        "mlp",
        "moe",
        "moe",
        "mystery",
    ]
    rule = HiddenMatrices(
        stack_axis=0,
        overrides={"^mystery": None, "gate|c_attn/k": Dims(1, 0)},
    )
    assert decided(params, rule) == {
        "['alone']['kernel']": Dims(1, 2),
        "['conv_out']['c_attn']['bias']": None,
        "['conv_out']['c_attn']['kernel']": Dims(1, 0),
        "['mlp']['gate']['kernel']": Dims(1, 0),
        "['moe']['gate']['kernel']": Dims(1, 0),
        "['moe']['up']": Dims(1, 2),
        "['mystery']": None,
        "['sure']['kernel']": Dims(0, 1),
    }


def test_a_single_array_has_no_name():
    with pytest.raises(TypeError, match="a name for each leaf"):
        hidden_matrices(spec(4, 8))


def test_variables_of_nnx_and_boxes_of_linen_run():
    block = nnx.state(nnx.eval_shape(lambda: NnxBlock(nnx.Rngs(0))), nnx.Param)
    boxed = {"mlp": {"kernel": nn.Partitioned(spec(4, 8), ("a", "b"))}}
    for params, num_matrices in ((block, 6), (boxed, 1)):
        tx = dmuon(0.1, muon_weight_dimension_numbers=hidden_matrices)
        state = jax.eval_shape(tx.init, params)
        updates, state = jax.eval_shape(tx.update, params, state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        momentum = state.inner_states["muon"].inner_state[0].mu
        assert len(jax.tree.leaves(momentum)) == num_matrices


def test_small_leaves_and_integers_go_to_adam():
    params = {
        "count": spec(3, 4, dtype=jnp.int32),
        "scalar": spec(),
        "cls": spec(1, 1, 8),
        "probe": spec(1, 1, 8),
        "to_one": {"kernel": spec(8, 1)},
        "stack": {"to_one": {"kernel": spec(4, 8, 1), "bias": spec(4, 1)}},
        "number": 1.0,
    }
    assert set(decided(params).values()) == {None}


SIZES = st.integers(1, 4)


@st.composite
def layer_trees(draw):
    """Some leaves of a stack of layers, and the letters of their axes."""
    width, mlp, heads, keys, head, layers = (draw(SIZES) for _ in range(6))
    axis = draw(st.sampled_from([None, 0, 1, -1]))
    with_bias, with_norm, flat = (draw(st.booleans()) for _ in range(3))
    shapes, found = {}, {}

    def add(path, shape, letters):
        shape, letters = list(shape), list(letters)
        if axis is not None:
            position = axis % (len(shape) + 1)
            shape.insert(position, layers)
            letters.insert(position, "b")
        if draw(st.integers(0, 9)):
            shapes[f"layers/{path}"] = spec(*shape)
            found[f"['layers/{path}']"] = "".join(letters)

    def kernel(path, shape, letters):
        add(f"{path}/kernel", shape, letters)
        if with_bias:
            out = [n for n, x in zip(shape, letters, strict=True) if x == "o"]
            add(f"{path}/bias", out, "v" * len(out))

    for name, count in (("query", heads), ("key", keys)):
        if flat:
            kernel(f"attention/{name}", (width, count * head), "io")
        else:
            kernel(f"attention/{name}", (width, count, head), "ioo")
    if flat:
        kernel("attention/out", (heads * head, width), "io")
    else:
        kernel("attention/out", (heads, head, width), "iio")
    kernel("mlp/wi", (width, mlp), "io")
    kernel("mlp/wo", (mlp, width), "io")
    if with_norm:
        add("norm/scale", (width,), "v")
    return shapes, found


@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(layer_trees())
def test_an_answer_is_never_wrong(case):
    """Where sizes coincide or leaves are missing, some are refused, and none is wrong."""
    params, letters = case
    for path, decision in hidden_matrices.explain(params).items():
        if decision.is_decided:
            assert is_right(params[path[2:-2]].shape, letters[path], decision.dims)


def is_right(shape, letters, dims):
    """Whether ``dims`` give the update that ``letters`` ask for."""
    right = [[a for a, x in enumerate(letters) if x == kind] for kind in "io"]
    fans = [math.prod(shape[axis] for axis in axes) for axes in right]
    if dims is None:
        return "v" in letters or 1 in fans
    got = [[axes] if isinstance(axes, int) else list(axes) for axes in dims]
    return got == right or (got == right[::-1] and fans[0] == fans[1])


def numbers(tree, seed):
    """Random arrays in place of shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), tree
    )


def test_dmuon_equals_optax_and_neighbours_count_in_both_halves():
    """Of these leaves only the biases and scales tell the layer axis; Adam has them."""
    d = 8
    shapes = {
        "layers": {
            "attention": {"query": {"kernel": spec(3, d, 2, 4)}},
            "mlp": {"kernel": spec(3, d, d), "bias": spec(3, d)},
            "norm": {"scale": spec(3, d)},
        },
        "embed": {"embedding": spec(20, d)},
    }
    masked = {
        "layers": {
            "attention": shapes["layers"]["attention"],
            "mlp": {"kernel": spec(3, d, d), "bias": optax.MaskedNode()},
            "norm": {"scale": optax.MaskedNode()},
        },
        "embed": {"embedding": optax.MaskedNode()},
    }
    with pytest.raises(ValueError, match="one reading"):
        hidden_matrices(masked)
    params = numbers(shapes, 0)
    dims = hidden_matrices(params)
    assert dims["layers"]["mlp"]["kernel"] == Dims(1, 2)
    ours = dmuon(0.1, weight_decay=0.1, muon_weight_dimension_numbers=hidden_matrices)
    theirs = optax.contrib.muon(
        0.1, weight_decay=0.1, muon_weight_dimension_numbers=dims
    )

    def run(tx, steps=2):
        @jax.jit
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        new, state = params, tx.init(params)
        for seed in range(steps):
            new, state = step(new, state, numbers(shapes, seed + 1))
        return new, state

    (a, state_a), (b, state_b) = run(ours), run(theirs)
    assert jax.tree.structure(state_a) == jax.tree.structure(state_b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), a, b)


def flags_of(params, rule=None):
    return {
        row.path: row.flags for row in routing_report(params, rule).rows if row.flags
    }


def test_report_flags_the_default_rule_on_stacks():
    params = routing_trees.shapes(routing_trees.FAULTY_EXAMPLE)
    stack = "2-D leaf on Muon looks like a stack of biases"
    assert flags_of(params) == {
        "['bias']": (stack,),
        "['kernel']": ("3-D leaf on Adam",),
        "['scale']": (stack,),
    }
    assert not routing_report(params, hidden_matrices).flags


def test_report_flags_each_kind():
    params = {
        "embed": {"embedding": spec(20, 8)},
        "lm_head": {"kernel": spec(8, 20)},
        "router": {"kernel": spec(8, 4)},
        "one": {"kernel": spec(8, 1)},
        "ids": spec(4, 4, dtype=jnp.int32),
        "mix": {"table": spec(3, 8, 16), "shift": spec(3, 16)},
        "torch": {"weight": spec(16, 8), "bias": spec(16)},
        "fine": {"kernel": spec(8, 16), "bias": spec(16)},
    }
    assert flags_of(params) == {
        "['embed']['embedding']": ("named as an embedding, on Muon",),
        "['ids']": ("not floating point",),
        "['lm_head']['kernel']": ("named as an unembedding, on Muon",),
        "['mix']['shift']": ("2-D leaf on Muon looks like a stack of biases",),
        "['mix']['table']": ("3-D leaf on Adam",),
        "['one']['kernel']": ("matrices with one row or column",),
        "['router']['kernel']": ("named as a router, on Muon",),
        "['torch']['weight']": (
            "reduction (0,) and output (1,), where names and shapes fit only "
            "reduction (1,) and output (0,)",
        ),
    }
    wrong = {"kernel": spec(8, 16)}
    assert "must name dimensions" in flags_of(wrong, Dims(0, 5))["['kernel']"][0]
    (flag,) = flags_of({"mystery": spec(8, 8)}, hidden_matrices)["['mystery']"]
    assert flag.startswith("refused: shape (8, 8): a name that says nothing")


def test_report_rows_and_table():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    params = {
        "layers": {
            "mlp": {"kernel": spec(4, 8, 16), "bias": spec(4, 16)},
            "norm": {"scale": spec(4, 8)},
        }
    }
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec()), params)
    shardings["layers"]["mlp"]["kernel"] = NamedSharding(
        mesh, PartitionSpec("data", None, "model")
    )
    report = routing_report(params, hidden_matrices, param_shardings=shardings)
    kernel = report.rows[1]
    assert kernel.route == "muon"
    assert (kernel.num_matrices, kernel.matrix_shape) == (4, (8, 16))
    assert kernel.dtype == "float32" and kernel.shape == (4, 8, 16)
    assert kernel.reason.startswith(
        "reduction [1], output [2], batch [0]: all that fits"
    )
    lines = str(report).splitlines()
    assert lines[2].split("  ") == [
        "['layers']['mlp']['kernel']",
        "muon",
        " (4, 8, 16)",
        "float32",
        "4 x (8, 16)",
        "P('data', None, 'model')",
    ]
    assert lines[-1] == "3 leaves: 1 to Muon with 4 matrices, 2 to Adam; 0 flags"
    hidden = jax.jit(lambda p: [r.sharding for r in routing_report(p).rows][0] and p)
    arrays = numbers(params, 0)
    jax.tree.map(np.testing.assert_array_equal, hidden(arrays), arrays)
