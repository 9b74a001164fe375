"""A function of matrices that is none is refused before it runs, with the place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmuon_jax import Split, map_matrices


def params():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    host = {"layer": {"w": jnp.ones((16, 8)), "name": "tower"}, "fused": jnp.ones((8, 24))}
    place = NamedSharding(mesh, PartitionSpec("x"))
    return jax.tree.map(lambda x: x if isinstance(x, str) else jax.device_put(x, place), host)


@pytest.mark.parametrize(
    ("fn", "error", "words"),
    [
        (lambda x: x[:, :1], ValueError, r"must keep the shape, got \[2, 1, "),
        (lambda x: x[0], ValueError, r"must keep the shape, got \[8, 16\]"),
        (lambda x: x.mean(), ValueError, r"must keep the shape, got \[\]"),
        (lambda x: jnp.swapaxes(x, 1, 2), ValueError, r"must keep the shape, got \[2, 16, 8\]"),
        (lambda x: x[:1], ValueError, r"must keep the shape, got \[1, 8, "),
        (lambda x: "text", TypeError, "must give an array, got str"),
        (lambda x: None, TypeError, "must give an array, got NoneType"),
        (lambda x: (x, x), TypeError, "must give an array, got tuple"),
        (lambda x: [1.0], TypeError, "must give an array, got list"),
        (lambda x: 1.0, TypeError, "must give an array, got float"),
    ],
)
def test_what_gives_no_matrices_is_refused(fn, error, words):
    """Traced once for each shape, before anything runs.

    Fault: a function for `map_matrices` gives another shape, or no array
    Happens: ValueError or TypeError names what it gave, for which shape, and the leaf
    Kept: nothing has run
    """
    tree = {"layer": params()["layer"]}
    where = r"\[2, 8, 16\], the matrix at \['layer'\]\['w'\]"
    with pytest.raises(error, match=f"{words}.*{where}"):
        map_matrices(fn, tree)


def test_each_shape_is_tried_pieces_apart():
    tree = params()
    rules = {"layer": None, "fused": Split((4, 20))}
    seen = []

    def fn(x):
        seen.append(x.shape[1:])
        return x[:, :4] if x.shape[2] == 20 else x

    with pytest.raises(ValueError, match=r"got \[2, 4, 20\] .* the matrix at \['fused'\]"):
        map_matrices(fn, tree, weight_dimension_numbers=rules)
    assert sorted(seen) == [(4, 8), (8, 20)]


def test_swapped_arguments_are_refused():
    with pytest.raises(TypeError, match="fn must be a function of matrices, got dict"):
        map_matrices(params(), lambda x: x)


def test_leaves_that_are_no_matrices_come_back():
    tree = params()
    result = map_matrices(lambda x: 2 * x, tree)
    assert result["layer"]["name"] == "tower"
    np.testing.assert_array_equal(result["layer"]["w"], 2 * tree["layer"]["w"])
