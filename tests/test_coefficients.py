"""Coefficients: published values, what they do to singular values, and their restarts."""

import numpy as np
import optax
import pytest

from dmuon_jax import dmuon, scale_by_dmuon
from dmuon_jax.coefficients import JORDAN, YOU, resolve_coefficients
from dmuon_jax.gram import default_restarts
from dmuon_jax.polar_express import polar_express
from dmuon_jax.restarts import choose_restarts, gram_error

# Amsel et al., arXiv 2505.16932: the table in the paper, before its safety factor.
PUBLISHED = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
TABLES = {
    "jordan": (JORDAN,) * 5,
    "you": YOU,
    "polar_express": polar_express(5),
    "polar_express 1.05": polar_express(5, safety=1.05),
}


def composed(table, x):
    for a, b, c in table:
        x = a * x + b * x**3 + c * x**5
    return x


def test_polar_express_is_the_published_table():
    np.testing.assert_allclose(polar_express(8, safety=1.0), PUBLISHED, atol=5e-9)
    found = np.asarray(polar_express(8, safety=1.01))
    stretched = np.asarray(PUBLISHED) / 1.01 ** np.array([1, 3, 5])
    np.testing.assert_allclose(found[:-1], stretched[:-1], atol=5e-9)
    np.testing.assert_allclose(found[-1], PUBLISHED[-1], atol=5e-9)


@pytest.mark.parametrize("lower", [1e-1, 3e-2])
def test_polar_express_steps_are_minimax(lower):
    """Equal errors of alternating sign at four points: no odd quintic is nearer to 1."""
    (row,) = polar_express(1, safety=1.0, lower=lower)
    x = np.linspace(lower, 1, 200_001)
    error = composed([row], x) - 1
    size = np.max(np.abs(error))
    turns = np.flatnonzero(np.abs(error) > size * (1 - 1e-9))
    signs = np.sign(error[turns])
    assert list(signs[np.flatnonzero(np.diff(signs, prepend=0))]) == [-1, 1, -1, 1]


@pytest.mark.parametrize("steps", [1, 2, 5, 9, 12])
def test_polar_express_converges_with_any_number_of_steps(steps):
    x = np.geomspace(1e-3, 1, 10_001)
    worst = [
        np.max(np.abs(composed(polar_express(n, safety=1.0), x) - 1))
        for n in (steps, steps + 1)
    ]
    assert len(polar_express(steps)) == steps
    assert worst[1] < max(worst[0], 1e-6)


def test_singular_values_after_five_steps():
    """Where each table takes singular values of 1 down to a thousandth."""
    x = np.geomspace(1e-3, 1, 10_001)
    bands = {
        name: (composed(table, x).min(), composed(table, x).max())
        for name, table in TABLES.items()
    }
    right = {
        "jordan": (0.427, 1.205),
        "you": (0.47, 1.15),
        "polar_express": (0.75, 1.2),
        "polar_express 1.05": (0.7, 1.2),
    }
    for name, (low, high) in right.items():
        assert low <= bands[name][0] and bands[name][1] <= high, (name, bands[name])
    assert composed((JORDAN,) * 5, 1.0) == pytest.approx(0.69644, abs=1e-5)


def test_names():
    assert resolve_coefficients("jordan", 5) == resolve_coefficients("standard", 7)
    assert resolve_coefficients("you", 5) == resolve_coefficients("dion", 5) == YOU
    assert resolve_coefficients("polar_express", 7) == polar_express(7)
    for name, theirs in (("jordan", "standard"), ("you", "dion")):
        one = {"w": np.ones((2, 3), np.float32)}
        ours = dmuon(1.0, ns_coeffs=name).init(one)
        optax_state = optax.contrib.muon(1.0, ns_coeffs=theirs).init(one)
        found, right = (
            np.asarray(s.inner_states["muon"].inner_state[0].ns_coeffs)
            for s in (ours, optax_state)
        )
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize(
    "coefficients, steps, message",
    [
        ("quintic", 5, "ns_coeffs must be a triple, a table or one of"),
        ((1.0, 2.0), 5, r"ns_coeffs must have shape \(3,\) or \(n, 3\), got \(2,\)"),
        (YOU, 4, "ns_coeffs must have at most ns_steps=4 rows, got 5"),
        ("polar_express", np.array(5.5), "ns_steps must be a plain integer"),
    ],
)
def test_wrong_coefficients_are_refused(coefficients, steps, message):
    with pytest.raises(ValueError, match=message):
        resolve_coefficients(coefficients, steps)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0,), "steps must be at least 1, got 0"),
        ((5, 0.9), r"safety must lie in \[1, 2\), got 0.9"),
        ((5, 1.0, 1.0), r"lower must lie in \(0, 1\), got 1.0"),
    ],
)
def test_wrong_polar_express_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        polar_express(*arguments)


@pytest.mark.parametrize("dtype, limit", [("float16", 3e-2), ("float32", 5e-5)])
@pytest.mark.parametrize("name", TABLES)
def test_default_restarts_suit_the_shipped_tables(name, dtype, limit):
    """What the Gram form adds to the rounding of its input, on hard spectra."""
    table = TABLES[name]
    found = gram_error(table, dtype, default_restarts(5))
    best = gram_error(table, dtype, choose_restarts(table, dtype))
    assert found <= limit
    assert found <= 2.5 * best
    assert gram_error(table, dtype, ()) > 10 * found


def test_chosen_restarts():
    assert choose_restarts((JORDAN,) * 5, "float16") == (3,)
    assert choose_restarts(YOU, "float16") == (2,)
    assert choose_restarts((JORDAN,), "float16") == ()


def test_restarts_are_checked_at_construction():
    for make in (scale_by_dmuon, lambda **options: dmuon(1.0, **options)):
        with pytest.raises(ValueError, match=r"restarts must lie in 1\.\.4, got \(5,\)"):
            make(restarts=(5,))
        with pytest.raises(ValueError, match=r"restarts must lie in 1\.\.2, got \(3,\)"):
            make(restarts=(3,), ns_coeffs=YOU[:3])
