"""dmuon_jax: the Muon optimizer for JAX at distributed scale."""
