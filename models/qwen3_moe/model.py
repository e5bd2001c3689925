"""Builds a Qwen3 with experts on one device out of the parts in ``torchtrain.nn``."""

from __future__ import annotations

from torch import nn

from models.qwen3_moe.architecture import Qwen3MoeArchitecture
from torchtrain.losses.cross_entropy import LogitsLoss
from torchtrain.nn.attention import Attention, AttentionConfig, SDPACore
from torchtrain.nn.decoder import Decoder
from torchtrain.nn.decoder_block import DecoderBlock
from torchtrain.nn.feed_forward import FeedForward
from torchtrain.nn.flops import training_flops_per_token
from torchtrain.nn.init import InitRule, decoder_init_rule
from torchtrain.nn.load_balance import BalanceConfig
from torchtrain.nn.moe import MoE, RoutedExperts
from torchtrain.nn.rms_norm import RMSNorm
from torchtrain.nn.rope import RopeConfig
from torchtrain.nn.routing import Router, RouterConfig


def build_qwen3_moe(architecture: Qwen3MoeArchitecture) -> Decoder:
    """Build the model on the current default device; parameter values are undefined until drawn or loaded."""
    return Decoder(
        embed_tokens=nn.Embedding(architecture.vocab_size, architecture.hidden_size),
        layers=(_build_block(architecture, layer) for layer in range(architecture.num_hidden_layers)),
        norm=RMSNorm(architecture.hidden_size, architecture.rms_norm_eps),
        lm_head=nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False),
        rope=RopeConfig(head_dim=architecture.head_dim, theta=architecture.rope_theta),
        tie_word_embeddings=architecture.tie_word_embeddings,
        token_loss=LogitsLoss(),
    )


def init_rule(architecture: Qwen3MoeArchitecture, fqn: str) -> InitRule:
    """Say how a parameter is drawn: as in any decoder."""
    return decoder_init_rule(
        fqn,
        initializer_range=architecture.initializer_range,
        num_hidden_layers=architecture.num_hidden_layers,
    )


def flops_per_token(architecture: Qwen3MoeArchitecture, seq_len: int) -> float:
    """Count training FLOPs per token by ``nn.flops``, of the experts those that a token visits."""
    return training_flops_per_token(
        num_matmul_parameters=architecture.num_matmul_parameters,
        num_layers=architecture.num_hidden_layers,
        num_attention_heads=architecture.num_attention_heads,
        head_dim=architecture.head_dim,
        seq_len=seq_len,
    )


def _build_block(architecture: Qwen3MoeArchitecture, layer: int) -> DecoderBlock:
    attention = AttentionConfig(
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_key_value_heads=architecture.num_key_value_heads,
        head_dim=architecture.head_dim,
        attention_bias=architecture.attention_bias,
        qk_norm_eps=architecture.rms_norm_eps,
    )
    return DecoderBlock(
        self_attn=Attention(attention, SDPACore()),
        mlp=_build_moe(architecture)
        if architecture.has_experts(layer)
        else FeedForward(architecture.hidden_size, architecture.intermediate_size),
        input_layernorm=RMSNorm(architecture.hidden_size, architecture.rms_norm_eps),
        post_attention_layernorm=RMSNorm(architecture.hidden_size, architecture.rms_norm_eps),
    )


def _build_moe(architecture: Qwen3MoeArchitecture) -> MoE:
    hidden_size, shared_size = architecture.hidden_size, architecture.shared_expert_intermediate_size
    # Hugging Face averages over layers what here adds up: the same coefficient must weigh the same.
    balance = BalanceConfig(
        aux_loss_coef=architecture.router_aux_loss_coef / architecture.num_sparse_layers,
        aux_loss_scope=architecture.router_aux_loss_scope,
        z_loss_coef=architecture.router_z_loss_coef / architecture.num_sparse_layers,
        bias_update_rate=architecture.router_bias_update_rate,
    )
    router = RouterConfig(
        hidden_size=hidden_size,
        num_experts=architecture.num_experts,
        num_experts_per_tok=architecture.num_experts_per_tok,
        norm_topk_prob=architecture.norm_topk_prob,
        balance=balance,
    )
    return MoE(
        router=Router(router),
        experts=RoutedExperts(architecture.num_experts, hidden_size, architecture.moe_intermediate_size),
        shared_expert=FeedForward(hidden_size, shared_size) if shared_size else None,
        shared_expert_gate=nn.Linear(hidden_size, 1, bias=False) if shared_size else None,
    )
