"""Builds the text side of a Qwen3.5 with experts on one device out of the parts in ``torchtrain.nn``."""

from __future__ import annotations

from torch import nn

from models.qwen3_5_moe.architecture import Qwen3_5MoeArchitecture
from torchtrain.losses.cross_entropy import LogitsLoss
from torchtrain.nn.attention import Attention, AttentionConfig, SDPACore
from torchtrain.nn.decoder import Decoder
from torchtrain.nn.decoder_block import DecoderBlock
from torchtrain.nn.feed_forward import FeedForward
from torchtrain.nn.flops import delta_rule_flops_per_token, training_flops_per_token
from torchtrain.nn.gated_delta_net import DeltaNetConfig, GatedDeltaNet, LocalDeltaNetCore
from torchtrain.nn.init import Constant, InitRule, LogUniform, Normal, decoder_init_rule
from torchtrain.nn.load_balance import BalanceConfig
from torchtrain.nn.moe import MoE, RoutedExperts
from torchtrain.nn.rms_norm import ZeroCentredRMSNorm
from torchtrain.nn.rope import RopeConfig
from torchtrain.nn.routing import Router, RouterConfig


def build_qwen3_5_moe(architecture: Qwen3_5MoeArchitecture) -> Decoder:
    """Build the model on the current default device; parameter values are undefined until drawn or loaded."""
    return Decoder(
        embed_tokens=nn.Embedding(architecture.vocab_size, architecture.hidden_size),
        layers=(_build_block(architecture, layer) for layer in range(architecture.num_hidden_layers)),
        norm=ZeroCentredRMSNorm(architecture.hidden_size, architecture.rms_norm_eps),
        lm_head=nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False),
        rope=RopeConfig(
            head_dim=architecture.head_dim,
            theta=architecture.rope_theta,
            partial_rotary_factor=architecture.partial_rotary_factor,
            mrope_section=architecture.mrope_section,
        ),
        tie_word_embeddings=architecture.tie_word_embeddings,
        token_loss=LogitsLoss(),
    )


def init_rule(architecture: Qwen3_5MoeArchitecture, fqn: str) -> InitRule:
    """Say how a parameter is drawn: as in any decoder, but for what it does not have.

    Norms around zero start at zero. A convolution has the variance of torch's own default, as its few weights are no
    matrix of the width that ``initializer_range`` is meant for. Decays start as in Hugging Face's class: per token
    between ``exp(-0.01 * softplus(1))`` and ``exp(-16 * softplus(1))``.
    """
    if fqn.endswith("norm.weight") and not fqn.endswith("linear_attn.norm.weight"):
        return Constant(0.0)
    if fqn.endswith("conv1d.weight"):
        return Normal((3 * architecture.linear_conv_kernel_dim) ** -0.5)
    if fqn.endswith("A_log"):
        return LogUniform(0.01, 16.0)
    if fqn.endswith("dt_bias"):
        return Constant(1.0)
    if fqn.endswith("out_proj.weight"):
        return Normal(architecture.initializer_range / (2 * architecture.num_hidden_layers) ** 0.5)
    return decoder_init_rule(
        fqn,
        initializer_range=architecture.initializer_range,
        num_hidden_layers=architecture.num_hidden_layers,
    )


def flops_per_token(architecture: Qwen3_5MoeArchitecture, seq_len: int) -> float:
    """Count training FLOPs per token by ``nn.flops``, of the experts those that a token visits."""
    num_attention = architecture.num_full_attention_layers
    attention = training_flops_per_token(
        num_matmul_parameters=architecture.num_matmul_parameters,
        num_layers=num_attention,
        num_attention_heads=architecture.num_attention_heads,
        head_dim=architecture.head_dim,
        seq_len=seq_len,
    )
    delta_rule = delta_rule_flops_per_token(
        num_layers=architecture.num_hidden_layers - num_attention,
        num_heads=architecture.linear_num_value_heads,
        key_head_dim=architecture.linear_key_head_dim,
        value_head_dim=architecture.linear_value_head_dim,
    )
    return attention + delta_rule


def _build_block(architecture: Qwen3_5MoeArchitecture, layer: int) -> DecoderBlock:
    attends = architecture.attends(layer)
    return DecoderBlock(
        self_attn=_build_attention(architecture) if attends else None,
        linear_attn=None if attends else _build_delta_net(architecture),
        mlp=_build_moe(architecture),
        input_layernorm=ZeroCentredRMSNorm(architecture.hidden_size, architecture.rms_norm_eps),
        post_attention_layernorm=ZeroCentredRMSNorm(architecture.hidden_size, architecture.rms_norm_eps),
    )


def _build_attention(architecture: Qwen3_5MoeArchitecture) -> Attention:
    config = AttentionConfig(
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_key_value_heads=architecture.num_key_value_heads,
        head_dim=architecture.head_dim,
        attention_bias=architecture.attention_bias,
        qk_norm_eps=architecture.rms_norm_eps,
        qk_norm=ZeroCentredRMSNorm,
        has_output_gate=True,
    )
    return Attention(config, SDPACore())


def _build_delta_net(architecture: Qwen3_5MoeArchitecture) -> GatedDeltaNet:
    config = DeltaNetConfig(
        hidden_size=architecture.hidden_size,
        num_key_heads=architecture.linear_num_key_heads,
        num_value_heads=architecture.linear_num_value_heads,
        key_head_dim=architecture.linear_key_head_dim,
        value_head_dim=architecture.linear_value_head_dim,
        conv_kernel_dim=architecture.linear_conv_kernel_dim,
        norm_eps=architecture.rms_norm_eps,
    )
    return GatedDeltaNet(config, LocalDeltaNetCore())


def _build_moe(architecture: Qwen3_5MoeArchitecture) -> MoE:
    hidden_size, num_layers = architecture.hidden_size, architecture.num_hidden_layers
    # Hugging Face averages over layers what here adds up: the same coefficient must weigh the same.
    balance = BalanceConfig(
        aux_loss_coef=architecture.router_aux_loss_coef / num_layers,
        aux_loss_scope=architecture.router_aux_loss_scope,
        z_loss_coef=architecture.router_z_loss_coef / num_layers,
        bias_update_rate=architecture.router_bias_update_rate,
    )
    router = RouterConfig(
        hidden_size=hidden_size,
        num_experts=architecture.num_experts,
        num_experts_per_tok=architecture.num_experts_per_tok,
        norm_topk_prob=True,
        balance=balance,
    )
    return MoE(
        router=Router(router),
        experts=RoutedExperts(architecture.num_experts, hidden_size, architecture.moe_intermediate_size),
        shared_expert=FeedForward(hidden_size, architecture.shared_expert_intermediate_size),
        shared_expert_gate=nn.Linear(hidden_size, 1, bias=False),
    )
