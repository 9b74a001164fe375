"""``dmuon``: Muon for matrices, AdamW for the rest. Mirrors ``optax.contrib.muon``."""

from typing import Any, Literal

import jax
import numpy as np
import optax

from dmuon_jax.coefficients import JORDAN, resolve_coefficients
from dmuon_jax.costs import Costs
from dmuon_jax.decay import add_cautious_decayed_weights
from dmuon_jax.paths import by_path
from dmuon_jax.place_state import place_state
from dmuon_jax.planning.plan import Plan
from dmuon_jax.planning.problem import Method
from dmuon_jax.routing import Router
from dmuon_jax.scaling import scale_by_matrix_shape
from dmuon_jax.shardings import (
    Seen,
    find_mesh,
    finish_sum,
    given_shardings,
    lookup,
    see,
)
from dmuon_jax.transform import check_flag, check_number, scale_by_dmuon, update_dtypes
from dmuon_jax.tree_checks import check_arrays, check_update


def dmuon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Any = JORDAN,
    ns_steps: jax.typing.ArrayLike = 5,
    beta: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: str = "frobenius",
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.999,
    adam_eps_root: jax.typing.ArrayLike = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: jax.typing.ArrayLike | None = None,
    plan: Plan | None = None,
    param_shardings: Any = None,
    momentum_shardings: Any = None,
    compute_dtype: jax.typing.DTypeLike | None = None,
    exchange_dtype: jax.typing.DTypeLike | None = None,
    method: Method | None = None,
    implementation: str | None = None,
    owner_axes: tuple[str, ...] | Literal["auto"] | None = None,
    max_wave_bytes: int | None = None,
    max_owner_bytes: int | None = None,
    costs: Costs = None,
    restarts: tuple[int, ...] | None = None,
    bias_correction: bool = True,
    sign_momentum: bool = False,
    matrix_transform: optax.GradientTransformation | None = None,
    cautious_weight_decay: bool = False,
) -> optax.GradientTransformation:
    """Muon whose Newton-Schulz iterations run once, each matrix on its owner device.

    A drop-in superset of ``optax.contrib.muon``: arguments up to ``consistent_rms`` have
    its names, defaults and meaning, and the state has its structure, so that a run can
    change from one to the other.

    A jitted ``init`` on Explicit axes must be called within ``jax.set_mesh(mesh)``: its
    results use no argument, so that nothing else tells JAX the devices.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from dmuon_jax import dmuon
      >>> tx = optax.chain(optax.clip_by_global_norm(1.0), dmuon(3e-3, weight_decay=0.1))
      >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
      >>> state = tx.init(params)
      >>> updates, state = tx.update(params, state, params)
      >>> updates["kernel"].shape
      (4, 8)

    Args:
      learning_rate: a number or a schedule.
      ns_coeffs: Newton-Schulz coefficients: a triple, a table of triples with a row for
        each step, or a preset: "jordan" (the default), "you", "polar_express" (safety
        1.01); optax's "standard" and "dion" name the first two.
      ns_steps: number of steps; ignored for a table.
      beta: decay rate of the momentum, in [0, 1).
      eps: added to the norm that divides each matrix, and in Adam's denominator.
      weight_decay: multiplied with the learning rate only, added after the shape scale.
      weight_decay_mask: a tree of bools (or a prefix, or a callable that gives one).
      mu_dtype: dtype of the momentum and of Adam's first moment; None: the parameter's.
      nesterov: whether to use Nesterov momentum (in both halves).
      adaptive: whether to scale each leaf by its dual norm (arXiv 2409.20325), one sum
        over the whole leaf as in optax.
      preconditioning: what scales a matrix before the iteration: "frobenius", "spectral",
        "aol" (arXiv 2512.04632) or "schatten" (arXiv 2506.10935).
      adam_b1: decay rate of Adam's first moment.
      adam_b2: decay rate of Adam's second moment.
      adam_eps_root: added under Adam's root.
      adam_weight_decay: weight decay of the Adam half.
      adam_learning_rate: learning rate of the Adam half; None: ``learning_rate``.
      muon_weight_dimension_numbers: which leaves go to Muon and which axes are reduction
        and output: a ``MuonDimensionNumbers``, or a ``Split`` for fused weights; a tree of
        them (None sends a leaf to Adam), a prefix of such a tree, or a callable from
        parameters to it, such as ``hidden_matrices``. None: all leaves with two
        dimensions. Axes not named are batch axes.
      consistent_rms: c: scale updates by ``c * sqrt(max(fan_in, fan_out))``
        (arXiv 2502.16982; 0.2 matches AdamW). None: ``sqrt(max(1, fan_out / fan_in))``.
      plan: a ``Plan`` from ``plan_owners``. None: made at ``init``.
      param_shardings: a tree of ``NamedSharding`` (or a prefix); needed where neither the
        arrays nor their types tell, e.g. with ``inject_hyperparams`` on Auto axes. Leaves
        that tell may be left out, and must not be contradicted.
      momentum_shardings: likewise for the momentum. None: as the parameter; replicated
        parameters have their momentum spread over the mesh (ZeRO) where it divides.
      compute_dtype: dtype of the iteration. None: float32 on CPU, float16 on GPU, bfloat16
        on TPU. Norms are taken in float32.
      exchange_dtype: dtype in which blocks travel. None: as ``compute_dtype``'s default.
      method: "direct" or "gram"; None: what the planner finds faster for each shape.
      implementation: "xla", "pallas", or None for the fastest that runs here.
      owner_axes: mesh axes over which owners are spread; along the others the iteration is
        repeated. None: all. "auto": the choice whose iterations and exchange take least
        time, a plan for each being made; the plan lists the others.
      max_wave_bytes: limit on the slots of a wave, EMPTY ones included, in bytes of
        float32; leaves are then worked through in waves, two at most under way. None: no
        limit.
      max_owner_bytes: limit on an owner's slots, of all waves together, in bytes of the
        exchange dtype. Every device allocates the slots of all groups, as many as the
        busiest owner of each needs, so EMPTY ones count. Plans above it are not made, given
        ones refused. None: no limit.
      costs: what owners' work takes: "measured" on this device (by ``measure_costs``; on
        several processes the first one measures and all use its table), "roofline" of the
        kind of device, ``Measured(cache=..., budget_s=...)``, a table from
        ``measure_costs``, or any cost model (hashable, with a ``repr`` that tells all). None:
        an eager ``init`` on GPU or TPU measures (once, in a budget of a minute), elsewhere
        and in a trace a roofline. "measured" needs an eager ``init`` before any trace; with
        ``inject_hyperparams``, whose inner transforms forget, pass a table or ``plan``.
      restarts: steps (0-based) before which the Gram form starts afresh, as
        ``restarts.choose_restarts`` finds them for a table. None: 2, 5, 8 and so on.
      bias_correction: whether the momentum is bias-corrected, as in optax. Without it the
        update is that of a momentum which is a plain sum, ``beta * mu + g``.
      sign_momentum: whether the signs of the momentum are orthogonalized (AdaMuon).
      matrix_transform: runs on the orthogonalized matrices, before the shape scale; e.g.
        ``normalize_neurons``.
      cautious_weight_decay: whether matrices decay only where that agrees with the update,
        see ``add_cautious_decayed_weights``.

    Returns:
      The ``GradientTransformation``.

    Raises:
      ValueError: wrong values; at ``init``: leaves that cannot be matrices, unknown
        shardings on a mesh, given ones that contradict the arrays' or are for no leaf, a
        plan made for something else.
      TypeError: arguments of a wrong kind; at ``update``: a schedule that gives no number,
        gradients of whole numbers for matrices.
    """
    ns_coeffs = resolve_coefficients(ns_coeffs, ns_steps)
    check_number("adam_b1", adam_b1, low=0.0, below=1.0)
    check_number("adam_b2", adam_b2, low=0.0, below=1.0)
    check_number("adam_eps_root", adam_eps_root, low=0.0)
    if consistent_rms is not None:
        check_number("consistent_rms", consistent_rms, low=0.0)
    learning_rate = checked_rate("learning_rate", learning_rate)
    if adam_learning_rate is None:
        adam_learning_rate = learning_rate
    else:
        adam_learning_rate = checked_rate("adam_learning_rate", adam_learning_rate)
    weight_decay = checked_rate("weight_decay", weight_decay)
    adam_weight_decay = checked_rate("adam_weight_decay", adam_weight_decay)
    check_flag("cautious_weight_decay", cautious_weight_decay)
    if not isinstance(matrix_transform, optax.GradientTransformation | None):
        raise TypeError(
            f"matrix_transform must be a GradientTransformation, got {matrix_transform!r}"
        )
    router = Router(muon_weight_dimension_numbers)
    if not cautious_weight_decay:
        decay = optax.add_decayed_weights(weight_decay, weight_decay_mask)
    elif callable(weight_decay):
        raise NotImplementedError(
            "weight_decay must be a number where it is cautious, got a schedule"
        )
    else:
        decay = add_cautious_decayed_weights(weight_decay, weight_decay_mask)
    matrices = optax.chain(
        scale_by_dmuon(
            ns_coeffs,
            ns_steps,
            beta,
            eps,
            mu_dtype,
            nesterov=nesterov,
            adaptive=adaptive,
            preconditioning=preconditioning,
            weight_dimension_numbers=router.dimensions,
            plan=plan,
            param_shardings=param_shardings,
            momentum_shardings=momentum_shardings,
            compute_dtype=compute_dtype,
            exchange_dtype=exchange_dtype,
            method=method,
            implementation=implementation,
            owner_axes=owner_axes,
            max_wave_bytes=max_wave_bytes,
            max_owner_bytes=max_owner_bytes,
            costs=costs,
            restarts=restarts,
            bias_correction=bias_correction,
            sign_momentum=sign_momentum,
        ),
        *([] if matrix_transform is None else [matrix_transform]),
        scale_by_matrix_shape(router.dimensions, consistent_rms),
        decay,
        optax.scale_by_learning_rate(learning_rate),
    )
    others = optax.adamw(
        learning_rate=adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        weight_decay=adam_weight_decay,
        mu_dtype=mu_dtype,
        nesterov=nesterov,
    )
    return on_mesh(
        optax.partition({"muon": matrices, "adam": on_sums(others)}, router.labels),
        param_shardings,
    )


def checked_rate(name: str, rate: optax.ScalarOrSchedule) -> optax.ScalarOrSchedule:
    """``rate``, a number or a schedule, which is checked each time that it is asked.

    Raises:
      TypeError: ``rate`` is neither; a schedule raises it where it gives no number.
    """
    if not callable(rate):
        check_number(name, rate, low=-np.inf)
        return rate

    def schedule(count):
        value = rate(count)
        try:
            shape = jax.typeof(value).shape
        except TypeError:
            shape = None
        if shape != ():
            raise TypeError(f"the schedule {name} must give a number, got {value!r}")
        return value

    return schedule


def on_sums(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """``tx`` on gradients whose sums over devices are finished."""

    def update_fn(updates, state, params=None):
        like = updates if params is None else params
        return tx.update(jax.tree.map(finish_sum, updates, like), state, params)

    return optax.GradientTransformation(tx.init, update_fn)


def on_mesh(
    tx: optax.GradientTransformation, param_shardings: Any
) -> optax.GradientTransformation:
    """``tx`` with its scalars on the parameters' mesh.

    Updates come in the dtype of gradient and parameter together, whatever the type of a
    learning rate: bfloat16 for both in bfloat16, float32 where either is.
    """

    def init_fn(params):
        check_arrays("params", params)
        state = tx.init(params)
        given = given_shardings(param_shardings)
        seen = {path: see(x, path) for path, x in by_path(params).items()}
        told = {path: lookup(given, path) for path in seen}
        told = {path: s.mesh for path, s in told.items() if s and s.mesh.size > 1}
        find_mesh(seen | {path: Seen(mesh, None) for path, mesh in told.items()})
        mesh = find_mesh(seen)
        for sharding in given.values():
            mesh = sharding.mesh if mesh is None and sharding.mesh.size > 1 else mesh
        if isinstance(mesh, jax.sharding.Mesh):
            return place_state(state, mesh, params)
        return state

    def update_fn(updates, state, params=None):
        check_update(updates, state, params)
        new, state = tx.update(updates, state, params)
        dtypes = update_dtypes(updates, params)
        return jax.tree.map(lambda x, dtype: x.astype(dtype), new, dtypes), state

    return optax.GradientTransformation(init_fn, update_fn)
