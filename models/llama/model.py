"""Builds a Llama on one device out of the parts in ``torchtrain.nn``."""

from __future__ import annotations

from torch import nn

from models.llama.architecture import LlamaArchitecture
from torchtrain.losses.cross_entropy import LogitsLoss
from torchtrain.nn.attention import Attention, AttentionConfig, SDPACore
from torchtrain.nn.decoder import Decoder
from torchtrain.nn.decoder_block import DecoderBlock
from torchtrain.nn.feed_forward import FeedForward
from torchtrain.nn.flops import training_flops_per_token
from torchtrain.nn.init import Constant, InitRule, Normal
from torchtrain.nn.rms_norm import RMSNorm
from torchtrain.nn.rope import Llama3Scaling, RopeConfig


def build_llama(architecture: LlamaArchitecture) -> Decoder:
    """Build the model on the current default device; parameter values are undefined until drawn or loaded."""
    return Decoder(
        embed_tokens=nn.Embedding(architecture.vocab_size, architecture.hidden_size),
        layers=(_build_block(architecture) for _ in range(architecture.num_hidden_layers)),
        norm=RMSNorm(architecture.hidden_size, architecture.rms_norm_eps),
        lm_head=nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False),
        rope=_rope_config(architecture),
        tie_word_embeddings=architecture.tie_word_embeddings,
        token_loss=LogitsLoss(),
    )


def init_rule(architecture: LlamaArchitecture, fqn: str) -> InitRule:
    """Say how a parameter is drawn.

    Matrices and embeddings are normal with ``initializer_range``; the projections that write into the residual stream
    (attention output, feed-forward down) are smaller by ``sqrt(2 * num_hidden_layers)``, so that the stream's variance
    at the last block does not grow with depth. Norms start at one, biases at zero.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """
    if fqn.endswith("norm.weight"):
        return Constant(1.0)
    if fqn.endswith(".bias"):
        return Constant(0.0)
    if fqn.endswith(("o_proj.weight", "down_proj.weight")):
        return Normal(architecture.initializer_range / (2 * architecture.num_hidden_layers) ** 0.5)
    return Normal(architecture.initializer_range)


def flops_per_token(architecture: LlamaArchitecture, seq_len: int) -> float:
    """Count training FLOPs per token by ``nn.flops``."""
    return training_flops_per_token(
        num_matmul_parameters=architecture.num_matmul_parameters,
        num_layers=architecture.num_hidden_layers,
        num_attention_heads=architecture.num_attention_heads,
        head_dim=architecture.head_dim,
        seq_len=seq_len,
    )


def _build_block(architecture: LlamaArchitecture) -> DecoderBlock:
    attention = AttentionConfig(
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_key_value_heads=architecture.num_key_value_heads,
        head_dim=architecture.head_dim,
        attention_bias=architecture.attention_bias,
    )
    return DecoderBlock(
        self_attn=Attention(attention, SDPACore()),
        mlp=FeedForward(architecture.hidden_size, architecture.intermediate_size),
        input_layernorm=RMSNorm(architecture.hidden_size, architecture.rms_norm_eps),
        post_attention_layernorm=RMSNorm(architecture.hidden_size, architecture.rms_norm_eps),
    )


def _rope_config(architecture: LlamaArchitecture) -> RopeConfig:
    scaling = architecture.rope_scaling
    return RopeConfig(
        head_dim=architecture.head_dim,
        theta=architecture.rope_theta,
        scaling=None
        if scaling is None
        else Llama3Scaling(
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_max_position_embeddings,
        ),
    )
