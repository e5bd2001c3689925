"""Builds the text side of a Qwen3.5 with experts on one device out of the parts in ``torchtrain.nn``."""

from __future__ import annotations

from torch import nn

from models.qwen3_5_moe.architecture import Qwen3_5MoeArchitecture
from torchtrain.losses.cross_entropy import LogitsLoss
from torchtrain.nn.decoder import Decoder
from torchtrain.nn.feed_forward import FeedForward
from torchtrain.nn.hybrid_decoder import build_hybrid_decoder, hybrid_flops_per_token, hybrid_init_rule
from torchtrain.nn.init import InitRule
from torchtrain.nn.load_balance import BalanceConfig
from torchtrain.nn.moe import MoE, RoutedExperts
from torchtrain.nn.routing import Router, RouterConfig


def build_qwen3_5_moe(architecture: Qwen3_5MoeArchitecture) -> Decoder:
    """Build the model on the current default device; parameter values are undefined until drawn or loaded."""
    return build_hybrid_decoder(architecture, build_mlp=lambda: _build_moe(architecture), token_loss=LogitsLoss())


def init_rule(architecture: Qwen3_5MoeArchitecture, fqn: str) -> InitRule:
    """Say how a parameter is drawn: as in any hybrid decoder."""
    return hybrid_init_rule(architecture, fqn)


def flops_per_token(architecture: Qwen3_5MoeArchitecture, seq_len: int) -> float:
    """Count training FLOPs per token by ``nn.flops``, of the experts those that a token visits."""
    num_matmul_parameters = architecture.num_matmul_parameters
    return hybrid_flops_per_token(architecture, num_matmul_parameters=num_matmul_parameters, seq_len=seq_len)


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
