"""Builds the text side of a dense Qwen3.5 on one device out of the parts in ``torchtrain.nn``."""

from __future__ import annotations

from models.qwen3_5.architecture import Qwen3_5Architecture
from torchtrain.losses.cross_entropy import LogitsLoss
from torchtrain.nn.decoder import Decoder
from torchtrain.nn.feed_forward import FeedForward
from torchtrain.nn.hybrid_decoder import build_hybrid_decoder, hybrid_flops_per_token, hybrid_init_rule
from torchtrain.nn.init import InitRule


def build_qwen3_5(architecture: Qwen3_5Architecture) -> Decoder:
    """Build the model on the current default device; parameter values are undefined until drawn or loaded."""

    def build_mlp() -> FeedForward:
        return FeedForward(architecture.hidden_size, architecture.intermediate_size)

    return build_hybrid_decoder(architecture, build_mlp=build_mlp, token_loss=LogitsLoss())


def init_rule(architecture: Qwen3_5Architecture, fqn: str) -> InitRule:
    """Say how a parameter is drawn: as in any hybrid decoder."""
    return hybrid_init_rule(architecture, fqn)


def flops_per_token(architecture: Qwen3_5Architecture, seq_len: int) -> float:
    """Count training FLOPs per token by ``nn.flops``."""
    num_matmul_parameters = architecture.num_matmul_parameters
    return hybrid_flops_per_token(architecture, num_matmul_parameters=num_matmul_parameters, seq_len=seq_len)
