"""Builds a Qwen2 on one device out of the parts in ``torchtrain.nn``."""

from __future__ import annotations

from torch import nn

from models.qwen2.architecture import Qwen2Architecture
from torchtrain.losses.cross_entropy import LogitsLoss
from torchtrain.nn.attention import Attention, AttentionConfig, SDPACore
from torchtrain.nn.decoder import Decoder
from torchtrain.nn.decoder_block import DecoderBlock
from torchtrain.nn.feed_forward import FeedForward
from torchtrain.nn.flops import training_flops_per_token
from torchtrain.nn.init import InitRule, decoder_init_rule
from torchtrain.nn.rms_norm import RMSNorm
from torchtrain.nn.rope import RopeConfig


def build_qwen2(architecture: Qwen2Architecture) -> Decoder:
    """Build the model on the current default device; parameter values are undefined until drawn or loaded."""
    return Decoder(
        embed_tokens=nn.Embedding(architecture.vocab_size, architecture.hidden_size),
        layers=(_build_block(architecture) for _ in range(architecture.num_hidden_layers)),
        norm=RMSNorm(architecture.hidden_size, architecture.rms_norm_eps),
        lm_head=nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False),
        rope=RopeConfig(head_dim=architecture.head_dim, theta=architecture.rope_theta),
        tie_word_embeddings=architecture.tie_word_embeddings,
        token_loss=LogitsLoss(),
    )


def init_rule(architecture: Qwen2Architecture, fqn: str) -> InitRule:
    """Say how a parameter is drawn: as in any decoder."""
    return decoder_init_rule(
        fqn,
        initializer_range=architecture.initializer_range,
        num_hidden_layers=architecture.num_hidden_layers,
    )


def flops_per_token(architecture: Qwen2Architecture, seq_len: int) -> float:
    """Count training FLOPs per token by ``nn.flops``."""
    return training_flops_per_token(
        num_matmul_parameters=architecture.num_matmul_parameters,
        num_layers=architecture.num_hidden_layers,
        num_attention_heads=architecture.num_attention_heads,
        head_dim=architecture.head_dim,
        seq_len=seq_len,
    )


def _build_block(architecture: Qwen2Architecture) -> DecoderBlock:
    attention = AttentionConfig(
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_key_value_heads=architecture.num_key_value_heads,
        head_dim=architecture.head_dim,
        has_qkv_bias=True,
    )
    return DecoderBlock(
        self_attn=Attention(attention, SDPACore()),
        mlp=FeedForward(architecture.hidden_size, architecture.intermediate_size),
        input_layernorm=RMSNorm(architecture.hidden_size, architecture.rms_norm_eps),
        post_attention_layernorm=RMSNorm(architecture.hidden_size, architecture.rms_norm_eps),
    )
