"""Builds decoders of gated delta nets with gated attention every few layers; families bring their feed-forward layers.

Source: Qwen3.5 as in Hugging Face's ``Qwen3_5TextModel`` and ``Qwen3_5MoeTextModel``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from torchtrain.nn.attention import Attention, AttentionConfig, SDPACore
from torchtrain.nn.decoder import Decoder, TokenLoss
from torchtrain.nn.decoder_block import DecoderBlock
from torchtrain.nn.flops import delta_rule_flops_per_token, training_flops_per_token
from torchtrain.nn.gated_delta_net import DeltaNetConfig, GatedDeltaNet, LocalDeltaNetCore
from torchtrain.nn.hybrid_sizes import HybridSizes
from torchtrain.nn.init import Constant, InitRule, LogUniform, Normal, decoder_init_rule
from torchtrain.nn.rms_norm import ZeroCentredRMSNorm
from torchtrain.nn.rope import RopeConfig


def build_hybrid_decoder(sizes: HybridSizes, *, build_mlp: Callable[[], nn.Module], token_loss: TokenLoss) -> Decoder:
    """Build the model on the current default device; parameter values are undefined until drawn or loaded.

    Args:
        sizes: A family's architecture.
        build_mlp: Makes a layer's feed-forward part, with or without experts.
        token_loss: What scores tokens unless a technique installs another.
    """
    return Decoder(
        embed_tokens=nn.Embedding(sizes.vocab_size, sizes.hidden_size),
        layers=(_build_block(sizes, layer, build_mlp()) for layer in range(sizes.num_hidden_layers)),
        norm=ZeroCentredRMSNorm(sizes.hidden_size, sizes.rms_norm_eps),
        lm_head=nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False),
        rope=RopeConfig(
            head_dim=sizes.head_dim,
            theta=sizes.rope_theta,
            partial_rotary_factor=sizes.partial_rotary_factor,
            mrope_section=sizes.mrope_section,
        ),
        tie_word_embeddings=sizes.tie_word_embeddings,
        token_loss=token_loss,
    )


def hybrid_init_rule(sizes: HybridSizes, fqn: str) -> InitRule:
    """Say how a parameter is drawn: as in any decoder, but for what it does not have.

    Norms around zero start at zero. A convolution has the variance of torch's own default, as its few weights are no
    matrix of the width that ``initializer_range`` is meant for. Decays start as in Hugging Face's class: per token
    between ``exp(-0.01 * softplus(1))`` and ``exp(-16 * softplus(1))``.
    """
    if fqn.endswith("norm.weight") and not fqn.endswith("linear_attn.norm.weight"):
        return Constant(0.0)
    if fqn.endswith("conv1d.weight"):
        return Normal((3 * sizes.linear_conv_kernel_dim) ** -0.5)
    if fqn.endswith("A_log"):
        return LogUniform(0.01, 16.0)
    if fqn.endswith("dt_bias"):
        return Constant(1.0)
    if fqn.endswith("out_proj.weight"):
        return Normal(sizes.initializer_range / (2 * sizes.num_hidden_layers) ** 0.5)
    return decoder_init_rule(fqn, initializer_range=sizes.initializer_range, num_hidden_layers=sizes.num_hidden_layers)


def hybrid_flops_per_token(sizes: HybridSizes, *, num_matmul_parameters: int, seq_len: int) -> float:
    """Count training FLOPs per token by ``nn.flops``.

    Args:
        sizes: A family's architecture.
        num_matmul_parameters: Weights that a token is multiplied with, mixers included.
        seq_len: Tokens of a sequence.
    """
    num_attention = sizes.num_full_attention_layers
    attention = training_flops_per_token(
        num_matmul_parameters=num_matmul_parameters,
        num_layers=num_attention,
        num_attention_heads=sizes.num_attention_heads,
        head_dim=sizes.head_dim,
        seq_len=seq_len,
    )
    delta_rule = delta_rule_flops_per_token(
        num_layers=sizes.num_hidden_layers - num_attention,
        num_heads=sizes.linear_num_value_heads,
        key_head_dim=sizes.linear_key_head_dim,
        value_head_dim=sizes.linear_value_head_dim,
    )
    return attention + delta_rule


def _build_block(sizes: HybridSizes, layer: int, mlp: nn.Module) -> DecoderBlock:
    attends = sizes.attends(layer)
    return DecoderBlock(
        self_attn=_build_attention(sizes) if attends else None,
        linear_attn=None if attends else _build_delta_net(sizes),
        mlp=mlp,
        input_layernorm=ZeroCentredRMSNorm(sizes.hidden_size, sizes.rms_norm_eps),
        post_attention_layernorm=ZeroCentredRMSNorm(sizes.hidden_size, sizes.rms_norm_eps),
    )


def _build_attention(sizes: HybridSizes) -> Attention:
    config = AttentionConfig(
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        attention_bias=sizes.attention_bias,
        qk_norm_eps=sizes.rms_norm_eps,
        qk_norm=ZeroCentredRMSNorm,
        has_output_gate=True,
    )
    return Attention(config, SDPACore())


def _build_delta_net(sizes: HybridSizes) -> GatedDeltaNet:
    config = DeltaNetConfig(
        hidden_size=sizes.hidden_size,
        num_key_heads=sizes.linear_num_key_heads,
        num_value_heads=sizes.linear_num_value_heads,
        key_head_dim=sizes.linear_key_head_dim,
        value_head_dim=sizes.linear_value_head_dim,
        conv_kernel_dim=sizes.linear_conv_kernel_dim,
        norm_eps=sizes.rms_norm_eps,
    )
    return GatedDeltaNet(config, LocalDeltaNetCore())
