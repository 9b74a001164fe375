"""Parameter trees of transformers, each with the routes a person would write.

A leaf is ``(shape, answer)``: ``A`` for Adam, else reduction and output axes.
"""

import jax
import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

A = None
IO = (0, 1)
L, D, F, H, K, HD, E, V = 4, 32, 96, 8, 2, 6, 10, 128
"""Layers, width, MLP width, heads, key heads, head size, experts, vocabulary."""


def is_leaf(x) -> bool:
    return isinstance(x, tuple)


def shapes(tree):
    """The tree of ``ShapeDtypeStruct``."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x[0], jnp.float32), tree, is_leaf=is_leaf
    )


def answers(tree) -> dict:
    """The hand-written answers by path."""
    items = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {
        jax.tree_util.keystr(path): x[1] and MuonDimensionNumbers(*x[1])
        for path, x in items
    }


MAXTEXT = {
    "params": {
        "token_embedder": {"embedding": ((V, D), A)},
        "decoder": {
            "decoder_norm": {"scale": ((D,), A)},
            "logits_dense": {"kernel": ((D, V), A)},
            "layers": {
                "pre_self_attention_layer_norm": {"scale": ((D, L), A)},
                "self_attention": {
                    "query": {"kernel": ((D, L, H, HD), (0, (2, 3)))},
                    "key": {"kernel": ((D, L, K, HD), (0, (2, 3)))},
                    "value": {"kernel": ((D, L, K, HD), (0, (2, 3)))},
                    "out": {"kernel": ((H, L, HD, D), ((0, 2), 3))},
                    "query_norm": {"scale": ((HD, L), A)},
                },
                "mlp": {
                    "wi_0": {"kernel": ((D, L, F), (0, 2))},
                    "wi_1": {"kernel": ((D, L, F), (0, 2))},
                    "wo": {"kernel": ((F, L, D), (0, 2))},
                },
            },
        },
    }
}

MAXTEXT_MOE = {
    "decoder": {
        "decoder_norm": {"scale": ((D,), A)},
        "dense_layers": {
            "norm": {"scale": ((D, 2), A)},
            "mlp": {
                "wi": {"kernel": ((D, 2, F), (0, 2))},
                "wo": {"kernel": ((F, 2, D), (0, 2))},
            },
        },
        "moe_layers": {
            "norm": {"scale": ((D, L), A)},
            "self_attention": {
                "wq_a": {"kernel": ((D, L, 12), (0, 2))},
                "wq_b": {"kernel": ((12, L, H, HD), (0, (2, 3)))},
                "wkv_b": {"kernel": ((14, L, H, HD), (0, (2, 3)))},
                "out": {"kernel": ((H, L, HD, D), ((0, 2), 3))},
            },
            "MoeBlock_0": {
                "gate": {"kernel": ((D, L, E), A), "bias": ((E, L), A)},
                "wi_0": ((E, L, D, F), (2, 3)),
                "wi_1": ((E, L, D, F), (2, 3)),
                "wo": ((E, L, F, D), (2, 3)),
            },
            "shared_experts": {"wi_0": {"kernel": ((D, L, F), (0, 2))}},
        },
    }
}

GEMMA = {
    "embedder": {"input_embedding": ((V, D), A)},
    "final_norm": {"scale": ((D,), A)},
    "layer_0": {
        "attn": {
            "q_einsum": {"w": ((H, D, HD), (1, (0, 2)))},
            "kv_einsum": {"w": ((2, K, D, HD), (2, (1, 3)))},
            "attn_vec_einsum": {"w": ((H, HD, D), ((0, 1), 2))},
            "_query_norm": {"scale": ((HD,), A)},
        },
        "mlp": {
            "gating_einsum": {"w": ((2, F, D), (2, 1))},
            "linear": {"w": ((F, D), IO)},
        },
        "pre_attention_norm": {"scale": ((D,), A)},
    },
}

OPENPI = {
    "PaliGemma": {
        "img": {
            "embedding": {"kernel": ((14, 14, 3, D), A), "bias": ((D,), A)},
            "pos_embedding": ((1, 64, D), A),
            "Transformer": {
                "encoder_norm": {"scale": ((D,), A), "bias": ((D,), A)},
                "encoderblock": {
                    "LayerNorm_0": {"scale": ((3, D), A), "bias": ((3, D), A)},
                    "MlpBlock_0": {
                        "Dense_0": {"kernel": ((3, D, F), (1, 2)), "bias": ((3, F), A)}
                    },
                    "MultiHeadDotProductAttention_0": {
                        "query": {
                            "kernel": ((3, D, H, HD), (1, (2, 3))),
                            "bias": ((3, H, HD), A),
                        },
                        "out": {
                            "kernel": ((3, H, HD, D), ((1, 2), 3)),
                            "bias": ((3, D), A),
                        },
                    },
                },
            },
            "head": {"kernel": ((D, 48), A), "bias": ((48,), A)},
        },
        "llm": {
            "embedder": {"input_embedding": ((V, D), A)},
            "final_norm_1": {"scale": ((D,), A)},
            "layers": {
                "attn": {
                    "q_einsum_1": {"w": ((L, H, D, HD), (2, (1, 3)))},
                    "kv_einsum_1": {"w": ((L, 2, 1, D, HD), (3, (2, 4)))},
                    "attn_vec_einsum_1": {"w": ((L, H, HD, D), ((1, 2), 3))},
                },
                "mlp_1": {
                    "gating_einsum": ((L, 2, D, F), (2, 3)),
                    "linear": ((L, F, D), (1, 2)),
                },
                "pre_ffw_norm_1": {"scale": ((L, D), A)},
            },
        },
    },
    "action_in_proj": {"kernel": ((7, D), IO), "bias": ((D,), A)},
    "time_mlp_in": {"kernel": ((D, D), IO), "bias": ((D,), A)},
}

QWEN_MOE = {
    "model": {
        "embed_tokens": {"embedding": ((V, D), A)},
        "norm": {"weight": ((D,), A)},
        "layers": [
            {
                "input_layernorm": {"weight": ((D,), A)},
                "self_attn": {
                    "q_proj": {"kernel": ((D, H * HD), IO), "bias": ((H * HD,), A)},
                    "k_proj": {"kernel": ((D, K * HD), IO), "bias": ((K * HD,), A)},
                    "v_proj": {"kernel": ((D, K * HD), IO), "bias": ((K * HD,), A)},
                    "o_proj": {"kernel": ((H * HD, D), IO)},
                    "q_norm": {"weight": ((HD,), A)},
                },
                "mlp": {
                    "gate": {"kernel": ((D, E), A)},
                    "experts": {
                        "gate_up_proj": ((E, D, 2 * F), (1, 2)),
                        "gate_up_proj_bias": ((E, 2 * F), A),
                        "down_proj": ((E, F, D), (1, 2)),
                    },
                    "shared_expert": {"up_proj": {"kernel": ((D, F), IO)}},
                    "shared_expert_gate": {"kernel": ((D, 1), A)},
                },
            },
            {
                "mlp": {
                    "gate_proj": {"kernel": ((D, F), IO)},
                    "down_proj": {"kernel": ((F, D), IO)},
                }
            },
        ],
    },
    "lm_head": {"kernel": ((D, V), A)},
}

MAMBA = {
    "norm_f": {"scale": ((D,), A)},
    "layers": {
        "norm": {"scale": ((D, 12), A)},
        "linear_attn": {
            "A_log": ((32, 12), A),
            "dt_bias": ((32, 12), A),
            "decay": ((32, 12), A),
            "conv1d": {"kernel": ((4, 12, 1, 64), A)},
            "in_proj_qkvz": {"kernel": ((D, 12, 64), (0, 2))},
            "out_proj": {"kernel": ((64, 12, D), (0, 2))},
        },
    },
}

CONVOLUTIONS = {
    "patch_embed": {"proj": {"kernel": ((4, 4, 3, D), A), "bias": ((D,), A)}},
    "stage": {
        "Conv_0": {"kernel": ((3, 3, 16, D), ((0, 1, 2), 3)), "bias": ((D,), A)},
        "Conv_1": {"kernel": ((5, D, F), ((0, 1), 2)), "bias": ((F,), A)},
        "dwconv": {"kernel": ((7, 7, 1, D), A), "bias": ((D,), A)},
        "norm": {"scale": ((D,), A)},
    },
}

EQUINOX = {
    "embedding": {"weight": ((V, D), A)},
    "blocks": [
        {
            "norm1": {"weight": ((D,), A), "bias": ((D,), A)},
            "attention": {
                "query_proj": {"weight": ((H * HD, D), (1, 0))},
                "output_proj": {"weight": ((D, H * HD), (1, 0))},
            },
            "mlp": {
                "layers": [
                    {"weight": ((F, D), (1, 0)), "bias": ((F,), A)},
                    {"weight": ((D, F), (1, 0)), "bias": ((D,), A)},
                ]
            },
            "conv": {"weight": ((D, 3, 5), ((1, 2), 0)), "bias": ((D, 1), A)},
        }
    ],
    "head": {"weight": ((V, D), A)},
}

EQUINOX_STACKED = {
    "blocks": {
        "norm": {"weight": ((L, D), A)},
        "query_proj": {"weight": ((L, H * HD, D), (2, 1))},
        "mlp_in": {"weight": ((L, F, D), (2, 1))},
        "mlp_out": {"weight": ((L, D, F), (2, 1))},
    },
}

STACK_LAST = {
    "layers": {
        "ln_1": {"scale": ((D, L), A)},
        "attn": {
            "qkv": {"kernel": ((D, 3, H, HD, L), (0, (2, 3)))},
            "out": {"kernel": ((H, HD, D, L), ((0, 1), 2))},
        },
        "mlp": {"fc1": {"kernel": ((D, F, L), (0, 1)), "bias": ((F, L), A)}},
    }
}

FLAT = {
    "layers.0.norm.scale": ((L, D), A),
    "layers.0.self_attn.wq": ((L, D, 48), (1, 2)),
    "layers.0.self_attn.wo": ((L, 48, D), (1, 2)),
    "layers.0.mlp.w_gate": ((L, D, F), (1, 2)),
    "layers.0.mlp.w_down": ((L, F, D), (1, 2)),
    "tok_embeddings": ((V, D), A),
}

FAULTY_EXAMPLE = {
    "kernel": ((4, 32, 64), (1, 2)),
    "bias": ((4, 64), A),
    "scale": ((4, 32), A),
}

NORM_TELLS = {
    "layers": {
        "attention": {
            "query": {"kernel": ((L, D, 48), (1, 2))},
            "out": {"kernel": ((L, 48, D), (1, 2))},
        },
        "norm": {"scale": ((L, D), A)},
    }
}
"""Without the norm, attention kernels of L and 48 heads would fit as well."""

GATES = {
    "mlp": {"gate": {"kernel": ((D, F), IO)}, "up": {"kernel": ((D, F), IO)}},
    "moe": {
        "gate": {"kernel": ((D, E), A)},
        "experts": {"gate": ((E, D, F), (1, 2)), "down": ((E, F, D), (1, 2))},
        "shared_expert": {"gate": {"kernel": ((D, F), IO)}, "up": ((D, F), IO)},
    },
    "moe_1": {
        "shared_mlp": {"gate": {"kernel": ((D, F), IO)}, "up": ((D, F), IO)},
    },
    "MoeBlock_0": {
        "router_logits": {"kernel": ((D, E), A)},
        "gate": ((E, D, F), (1, 2)),
        "up": ((E, D, F), (1, 2)),
    },
    "MoeBlock_1": {"gate": {"kernel": ((D, E), A)}, "wi": ((E, D, F), (1, 2))},
    "attention": {"head_0": {"query": {"kernel": ((D, HD), IO)}}},
    "head": {"Dense_0": {"kernel": ((D, V), A)}},
    "norm": {"scale": ((D,), A)},
}

BY_NAME = {
    "maxtext": MAXTEXT,
    "maxtext_moe": MAXTEXT_MOE,
    "gemma": GEMMA,
    "openpi": OPENPI,
    "qwen_moe": QWEN_MOE,
    "mamba": MAMBA,
    "convolutions": CONVOLUTIONS,
    "equinox": EQUINOX,
    "stack_last": STACK_LAST,
    "flat": FLAT,
    "gates": GATES,
    "norm_tells": NORM_TELLS,
    "faulty_example": FAULTY_EXAMPLE,
}
