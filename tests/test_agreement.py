"""What processes compare, and when; with real processes in ``test_processes``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dmuon_jax import agreement, dmuon, find_plan, plan_owners


@pytest.fixture
def gathered(monkeypatch):
    """Pretends that three processes compare; the last may send something else."""
    sent, odd = [], {}

    def gather(own):
        sent.append(own)
        other = own.copy()
        for index in odd.get(len(sent), ()):
            other[index] ^= 1
        return np.stack([own, own, other])

    monkeypatch.setattr(agreement.multihost_utils, "process_allgather", gather)
    return sent, odd


def test_versions_are_compared_alone_and_first(gathered):
    sent, odd = gathered
    agreement.check_agreement({"a": "x", "b": "y"})
    assert [x.shape for x in sent] == [(1, 32), (2, 32)]
    odd[3] = (0,)
    with pytest.raises(ValueError, match="other versions of .* on process 2 than"):
        agreement.check_agreement({"a": "x"})
    assert len(sent) == 3  # nothing was compared after them


def test_the_first_name_that_differs_is_told(gathered):
    _, odd = gathered
    odd[2] = (1, 2)
    with pytest.raises(ValueError, match="got other b on process 2 than on process 0"):
        agreement.check_agreement({"a": "x", "b": "y", "c": "z"})


def test_versions_are_those_of_jax_and_of_every_source(monkeypatch, tmp_path):
    before = agreement.versions()
    assert before == agreement.versions() and f"jax {jax.__version__}," in before
    (tmp_path / "agreement.py").write_text("")
    monkeypatch.setattr(agreement, "__file__", str(tmp_path / "agreement.py"))
    fewer = agreement.versions()
    (tmp_path / "more.py").write_text("x = 1")
    assert len({before, fewer, agreement.versions()}) == 3


def arrays():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return {"w": jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("x")))}, mesh


def test_only_eager_arrays_of_several_processes_are_compared(monkeypatch):
    params, mesh = arrays()
    assert not agreement.must_agree(params.values(), mesh)  # there is one process
    monkeypatch.setattr(agreement.jax, "process_count", lambda: 2)
    assert not agreement.must_agree(params.values(), mesh)  # and the other has no part

    def in_trace(w):
        assert not agreement.must_agree([w], mesh)
        return w

    jax.eval_shape(in_trace, params["w"])
    assert not agreement.must_agree([], AbstractMesh((8,), ("x",)))
    assert not agreement.must_agree([], None)


def test_a_plan_is_compared_once_before_it_is_used(monkeypatch):
    params, _ = arrays()
    compared = []
    monkeypatch.setattr(find_plan, "must_agree", lambda arrays, mesh: True)
    monkeypatch.setattr(
        find_plan, "check_agreement", lambda facts: compared.append(list(facts))
    )
    tx = dmuon(0.1, ns_steps=1)
    state = tx.init(params)
    tx.init(params)
    assert compared == [["parameters", "costs or options"], ["owners"]]
    tx = dmuon(0.1, ns_steps=1, plan=plan_owners(params))
    tx.init(params)
    assert compared[2:] == [["owners"]]
    assert jax.tree.structure(tx.init(params)) == jax.tree.structure(state)
    assert len(compared) == 3
