"""The one FLOP formula, so that MFU means the same for every family."""

from __future__ import annotations


def training_flops_per_token(
    *, num_matmul_parameters: int, num_layers: int, num_attention_heads: int, head_dim: int, seq_len: int
) -> float:
    """Count the FLOPs that training on one token needs, forward and backward.

    ``6 * num_matmul_parameters + 12 * num_layers * num_attention_heads * head_dim * seq_len * 1/2``

    A multiply-add is 2 FLOPs; backward costs twice the forward; hence 6 per weight. Attention does two products of
    ``head_dim`` per head and key (scores, values): 2 * 2 * 3 = 12. The 1/2 is the causal mask: a token sees half of the
    row on average. Not counted: recomputation (this is MFU, not HFU), embedding lookup, norms, softmax, rotary, and the
    saving from document masks.

    Args:
        num_matmul_parameters: Weights one token is multiplied with: all linear layers including the head, tied or not,
            without the embedding; of routed experts only those a token visits.
        num_layers: Layers with full causal attention.
        num_attention_heads: Query heads.
        head_dim: Size of one head.
        seq_len: Tokens per row.

    Source: Chowdhery et al. 2022, "PaLM", appendix B, with the causal 1/2 that it leaves out.
    """
    causal_share = 0.5
    attention = 12 * num_layers * num_attention_heads * head_dim * seq_len * causal_share
    return 6 * num_matmul_parameters + attention


def delta_rule_flops_per_token(*, num_layers: int, num_heads: int, key_head_dim: int, value_head_dim: int) -> float:
    """Count what gated delta nets add to ``training_flops_per_token``, by the recurrent form.

    ``18 * num_layers * num_heads * key_head_dim * value_head_dim``: a token reads the state for its key, writes it and
    reads it for its query, 2 FLOPs each per entry of the state, times 3 for backward. Chunks compute more and are
    faster; as with recomputation, that counts for nothing. Nor do decays and convolutions.
    """
    return 18 * num_layers * num_heads * key_head_dim * value_head_dim
