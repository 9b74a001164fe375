"""dmuon_jax: the Muon optimizer for JAX at distributed scale."""

from dmuon_jax.costs import Measured
from dmuon_jax.find_plan import plan_owners
from dmuon_jax.hidden_matrices import HiddenMatrices, hidden_matrices
from dmuon_jax.map_matrices import map_matrices, orthogonalize
from dmuon_jax.measure import measure_costs
from dmuon_jax.muon import dmuon
from dmuon_jax.place_state import place_state
from dmuon_jax.planning.plan import Plan
from dmuon_jax.routing_report import RoutingReport, routing_report
from dmuon_jax.split import Split
from dmuon_jax.state_shardings import state_shardings
from dmuon_jax.transform import scale_by_dmuon
from dmuon_jax.update_time import UpdatePath
from dmuon_jax.variants import adamuon, normuon

__all__ = [
    "HiddenMatrices",
    "Measured",
    "Plan",
    "Split",
    "RoutingReport",
    "UpdatePath",
    "adamuon",
    "dmuon",
    "hidden_matrices",
    "map_matrices",
    "measure_costs",
    "normuon",
    "orthogonalize",
    "place_state",
    "plan_owners",
    "routing_report",
    "scale_by_dmuon",
    "state_shardings",
]
