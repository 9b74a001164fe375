"""Shardings that are given and contradict what can be seen are refused, with the place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dmuon_jax import dmuon, map_matrices, orthogonalize, plan_owners, scale_by_dmuon

DIMS = optax.contrib.MuonDimensionNumbers()


def mesh8(kind=AxisType.Auto, sizes=(4, 2)):
    devices = np.array(jax.devices()[: sizes[0] * sizes[1]]).reshape(sizes)
    return Mesh(devices, ("fsdp", "data"), axis_types=(kind,) * 2)


def trees(mesh, abstract=False):
    """Parameters, and the shardings that they have."""
    shardings = {
        "layer": {"w": NamedSharding(mesh, P("fsdp", None)), "b": NamedSharding(mesh, P())},
        "v": NamedSharding(mesh, P(None, ("fsdp", "data"))),
    }
    host = {"layer": {"w": jnp.ones((16, 8)), "b": jnp.ones(8)}, "v": jnp.ones((4, 8))}
    if not abstract:
        return jax.device_put(host, shardings), shardings
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), host, shardings
    )
    return like, shardings


def readers(params, dims, **given):
    """Everything that takes ``param_shardings``, as calls."""
    options = {"muon_weight_dimension_numbers": dims}
    yield lambda: plan_owners(params, **options, **given)
    if isinstance(params["v"], jax.ShapeDtypeStruct):
        yield lambda: jax.eval_shape(dmuon(0.1, **options, **given).init, params)
        return
    yield lambda: dmuon(0.1, **options, **given).init(params)
    yield lambda: jax.jit(dmuon(0.1, **options, **given).init)(params)
    if "momentum_shardings" not in given:
        numbers = {"weight_dimension_numbers": dims}
        yield lambda: orthogonalize(params, **numbers, **given)
        yield lambda: map_matrices(lambda x: x, params, **numbers, **given)


def wrong_specs(mesh):
    """Shardings of ``layer.w`` that are not its own, and of the word that tells so."""
    yield P(None, "fsdp"), "must be those of the arrays"
    yield P(), "must be those of the arrays"
    yield P(("fsdp", "data")), "must be those of the arrays"
    yield P("fsdp", "data"), "must be those of the arrays"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("abstract", [False, True])
def test_a_spec_that_is_not_the_array_s_is_refused(kind, abstract):
    """Wherever it can be seen; a trace hides specs on Auto axes.

    Fault: `param_shardings` contradict the arrays' own shardings
    Happens: ValueError names both and the leaf; a trace over Auto axes cannot see it
    Kept: nothing has run
    """
    mesh = mesh8(kind)
    params, shardings = trees(mesh, abstract)
    dims = {"layer": {"w": optax.contrib.MuonDimensionNumbers(), "b": None}, "v": None}
    for spec, words in wrong_specs(mesh):
        given = shardings | {"layer": NamedSharding(mesh, spec)}
        if len(spec) > 1:  # a prefix would name a bias too
            given = shardings | {
                "layer": shardings["layer"] | {"w": NamedSharding(mesh, spec)}
            }
        for number, call in enumerate(readers(params, dims, param_shardings=given)):
            if number and (kind == AxisType.Auto) and (abstract or number == 2):
                continue  # a trace hides specs on Auto axes
            with pytest.raises(ValueError, match=rf"{words}, got .* at \['layer'\]\['w'\]"):
                call()


@pytest.mark.parametrize("abstract", [False, True])
def test_another_mesh_than_the_array_s_is_refused(abstract):
    params, _ = trees(mesh8(), abstract)
    for other in (mesh8(sizes=(2, 2)), mesh8(sizes=(2, 4)), mesh8(sizes=(1, 1))):
        given = NamedSharding(other, P())
        call = next(readers(params, None, param_shardings=given))
        with pytest.raises(ValueError, match=r"on the mesh of the array, .* at \['v'\]"):
            call()


def turned(mesh):
    """A mesh with the same axes over the same devices in another order."""
    return Mesh(mesh.devices[::-1], mesh.axis_names, axis_types=mesh.axis_types)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", ["w", "b", "v"])
def test_leaves_on_devices_in_another_order_are_refused(kind, name):
    """Names and sizes of the axes alone do not make a mesh.

    Fault: a parameter lies on a mesh with the others' axes and another order of devices
    Happens: `init` raises ValueError with both leaves and the devices
    Kept: nothing has run
    """
    spec = {"w": P("fsdp", None), "b": P(), "v": P(None, "data")}
    host = {"w": jnp.ones((16, 8)), "b": jnp.ones(8), "v": jnp.ones((8, 4))}
    mesh = mesh8(kind)
    told = {x: NamedSharding(turned(mesh) if x == name else mesh, spec[x]) for x in host}
    params = jax.device_put(host, told)
    both = r"one mesh, got .* of devices \d, .* at \['.'\] and .* of devices \d, .* at \['.'\]"
    calls = [dmuon(0.1).init, lambda x: dmuon(0.1, param_shardings=told).init(host)]
    if name != "b":
        rule = {"muon_weight_dimension_numbers": {"w": DIMS, "b": None, "v": DIMS}}
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), host, told
        )
        calls += [plan_owners, orthogonalize, lambda _: plan_owners(like, **rule)]
    for call in calls:
        with pytest.raises(ValueError, match=both) as error:
            call(params)
        assert f"['{name}']" in str(error.value)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", ["param_shardings", "momentum_shardings"])
def test_given_shardings_on_devices_in_another_order_are_refused(kind, name):
    mesh = mesh8(kind)
    params, _ = trees(mesh)
    dims = {"layer": {"w": DIMS, "b": None}, "v": DIMS}
    plan = plan_owners(params, muon_weight_dimension_numbers=dims)
    wrong = {"layer": {"w": NamedSharding(turned(mesh), P("fsdp", None))}}
    words = r"on the mesh of the .*of devices 0, .*got .*of devices 6, .* at \['layer'\]\['w'\]"
    like, _ = trees(mesh, abstract=True)
    calls = [
        lambda: dmuon(0.1, muon_weight_dimension_numbers=dims, **{name: wrong}).init(params),
        lambda: plan_owners(params, muon_weight_dimension_numbers=dims, **{name: wrong}),
        lambda: plan_owners(like, muon_weight_dimension_numbers=dims, **{name: wrong}),
        lambda: dmuon(
            0.1, muon_weight_dimension_numbers=dims, plan=plan, **{name: wrong}
        ).init(params),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(ValueError, match="mesh must be the one of the arrays.*of devices 6"):
        plan_owners(params, turned(mesh), muon_weight_dimension_numbers=dims)
    # Bare arrays lie where they are told to.
    host = jax.tree.map(np.asarray, params)
    told = {"param_shardings": trees(mesh)[1], "momentum_shardings": wrong}
    if name == "momentum_shardings":
        with pytest.raises(ValueError, match=words):
            dmuon(0.1, muon_weight_dimension_numbers=dims, **told).init(host)


@pytest.mark.parametrize("name", ["param_shardings", "momentum_shardings"])
def test_shardings_of_leaves_that_are_not_there_are_named(name):
    mesh = mesh8()
    params, shardings = trees(mesh)
    lost = {"wrong": NamedSharding(mesh, P()), "v": {"deep": NamedSharding(mesh, P())}}
    words = rf"{name} must be for leaves of params, got \['v'\]\['deep'\], \['wrong'\]"
    for call in readers(params, None, **{name: shardings | lost}):
        with pytest.raises(ValueError, match=words):
            call()


def test_what_shows_no_sharding_must_be_given_one():
    mesh = mesh8()
    host = {"w": jnp.ones((16, 8)), "v": jnp.ones((8, 8))}
    tx = dmuon(0.1, param_shardings={"w": NamedSharding(mesh, P("fsdp")), "v": None})
    for init in (tx.init, jax.jit(tx.init)):
        with pytest.raises(ValueError, match=r"for each matrix .* none at \['v'\]"):
            init(host)


def test_shardings_that_agree_are_taken():
    mesh = mesh8()
    params, shardings = trees(mesh)
    state = dmuon(0.1, param_shardings=shardings).init(params)
    spelled = shardings | {"layer": {"w": NamedSharding(mesh, P(("fsdp",)))}}
    again = dmuon(0.1, param_shardings=spelled).init(params)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(
        lambda x: x.sharding, again
    )
    ones = Mesh(np.array(jax.devices()).reshape(8, 1), ("fsdp", "one"))
    w = jax.device_put(jnp.ones((16, 8)), NamedSharding(ones, P("fsdp")))
    dmuon(0.1, param_shardings=NamedSharding(ones, P("fsdp", "one"))).init({"w": w})
    # What another transform keeps may be named, and arrays may come before their sharding.
    parts = {"w": params["layer"]["w"], "v": optax.MaskedNode()}, {"w": w, "v": None}
    for part in parts:
        given = {"w": part["w"].sharding, "v": {"deep": NamedSharding(mesh, P())}}
        scale_by_dmuon(param_shardings=given).init(part)
    dmuon(0.1, param_shardings=shardings).init(jax.tree.map(np.asarray, params))


@pytest.mark.parametrize("given", [False, True])
def test_a_jitted_init_on_explicit_axes_needs_a_mesh_context(given):
    mesh = mesh8(AxisType.Explicit)
    params, shardings = trees(mesh)
    tx = dmuon(0.1, param_shardings=shardings if given else None)
    with pytest.raises(ValueError, match="jax.set_mesh"):
        jax.jit(tx.init)(params)
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(tx.init(params)), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_a_sharding_must_divide_and_none_always_does():
    mesh = mesh8()
    odd = {"w": jax.device_put(jnp.ones((7, 5)), NamedSharding(mesh, P()))}
    rows = NamedSharding(mesh, P("fsdp"))
    with pytest.raises(ValueError, match="IndivisibleError|divide"):  # JAX's own
        jax.device_put(odd, rows)
    like = {"w": jax.ShapeDtypeStruct((7, 5), jnp.float32)}
    for call in (
        lambda: plan_owners(like, param_shardings=rows),
        lambda: dmuon(0.1, momentum_shardings=rows).init(odd),
    ):
        with pytest.raises(ValueError, match=r"must divide each dimension.* at \['w'\]"):
            call()
    dmuon(0.1).init(odd)
