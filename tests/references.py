"""Oracles in NumPy float64, written from the formulas."""

import math

import numpy as np

JORDAN = (3.4445, -4.7750, 2.0315)


def textbook_newton_schulz(
    x, table=(JORDAN,) * 5, eps=1e-8, preconditioning="frobenius"
):
    """Newton-Schulz of one matrix in float64: X <- a X + (b A + c A A) X, A = X Xᴴ."""
    x = np.asarray(x)
    x = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    tall = x.shape[0] > x.shape[1]
    x = preconditioned(x.T if tall else x, eps, preconditioning)
    for a, b, c in table:
        gram = x @ x.conj().T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def preconditioned(x, eps, preconditioning):
    """X as it enters the iteration, divided as ``optax.contrib.muon`` does."""
    gram = np.abs(x @ x.conj().T)
    if preconditioning == "aol":
        return x / np.sqrt(np.maximum(gram.sum(axis=1, keepdims=True), 1e-8))
    if preconditioning == "schatten":
        return x / np.sqrt(max(np.linalg.norm(gram), 1e-8))
    norm = np.linalg.norm(x, {"frobenius": None, "spectral": 2}[preconditioning]) + eps
    return x / norm if norm else x


def matrices(x, dims):
    """``[batch, fan_in, fan_out]`` view of a leaf, and the function that undoes it."""
    reduction, output = (
        tuple(a % x.ndim for a in ((axes,) if isinstance(axes, int) else axes))
        for axes in dims
    )
    batch = tuple(a for a in range(x.ndim) if a not in reduction + output)
    order = batch + reduction + output
    moved = np.transpose(x, order)
    fan_in = math.prod(x.shape[a] for a in reduction)
    fan_out = math.prod(x.shape[a] for a in output)
    stack = moved.reshape(-1, fan_in, fan_out)
    return stack, lambda y: np.transpose(y.reshape(moved.shape), np.argsort(order))


def orthogonalized(x, dims, table=(JORDAN,) * 5):
    """Newton-Schulz of each matrix of a leaf."""
    stack, undo = matrices(np.asarray(x, np.float64), dims)
    return undo(np.stack([textbook_newton_schulz(m, table) for m in stack]))


def shape_factor(shape, dims):
    """sqrt(max(1, fan_out / fan_in))."""
    stack, _ = matrices(np.zeros(shape), dims)
    return math.sqrt(max(1.0, stack.shape[2] / stack.shape[1]))


def muon_updates(params, grads, dims, *, rate, decay=0.0, beta=0.95, steps=5):
    """Updates and momentum of Muon with Nesterov momentum, step after step.

    Args:
      params: one leaf.
      grads: its gradients, one per step.
      dims: its matrix axes.
      rate, decay, beta: learning rate, weight decay, momentum decay.
      steps: Newton-Schulz steps.

    Yields:
      (update, momentum) of each step; parameters move by the update.
    """
    params = np.asarray(params, np.float64)
    mu = np.zeros_like(params)
    for t, grad in enumerate(np.asarray(g, np.float64) for g in grads):
        mu = beta * mu + (1 - beta) * grad
        ahead = beta * mu / (1 - beta ** (t + 2))
        ahead = ahead + (1 - beta) * grad / (1 - beta ** (t + 1))
        direction = orthogonalized(ahead, dims, (JORDAN,) * steps)
        scaled = shape_factor(params.shape, dims) * direction
        update = -rate * (scaled + decay * params)
        params = params + update
        yield update, mu


def relative(a, b):
    """||a - b|| / ||b||, and ||a|| where b is zero."""
    wide = np.complex128 if np.iscomplexobj(b) else np.float64
    a, b = np.asarray(a, wide), np.asarray(b, wide)
    return np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0)


def with_spectrum(values, columns, seed=0):
    """``[len(values), columns]`` with these singular values, its vectors random."""
    rng = np.random.default_rng(seed)
    rows = len(values)
    left, _ = np.linalg.qr(rng.normal(size=(rows, rows)))
    right, _ = np.linalg.qr(rng.normal(size=(columns, rows)))
    return (left * np.asarray(values)) @ right.T


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def second_moment_updates(grads, dims, *, per_neuron, sign, b1=0.95, b2=0.95):
    """Update directions of NorMuon or AdaMuon, from the equations of their papers.

    Args:
      grads: gradients of one leaf, one per step.
      dims: its matrix axes.
      per_neuron: NorMuon's mean over the inputs of each neuron, else AdaMuon's entries.
      sign: whether the signs of the momentum are orthogonalized.
      b1, b2: decay rates.

    Yields:
      0.2 sqrt(m n) O / ||O||_F of each matrix, to be multiplied with the learning rate.
    """
    momentum, second = 0.0, 0.0
    for grad in grads:
        momentum = b1 * momentum + (1 - b1) * np.asarray(grad, np.float64)
        source = np.sign(momentum) if sign else momentum
        stack, undo = matrices(orthogonalized(source, dims), dims)
        square = stack**2
        if per_neuron:
            square = square.mean(axis=1, keepdims=True)
        second = b2 * second + (1 - b2) * square
        stack = stack / (np.sqrt(second) + 1e-8)
        norm = np.linalg.norm(stack, axis=(1, 2), keepdims=True)
        area = stack.shape[1] * stack.shape[2]
        yield undo(0.2 * math.sqrt(area) * stack / norm)
