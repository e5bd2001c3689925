"""The gated delta net's parts: convolution, norms, and what its layers and gated attention read of their inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torchtrain.kernels.gated_delta_rule import chunked
from torchtrain.nn.gated_delta_net import DeltaNetConfig, GatedDeltaNet, LocalDeltaNetCore, convolve
from torchtrain.nn.init import LogUniform, draw_rows
from torchtrain.nn.rms_norm import GatedRMSNorm, ZeroCentredRMSNorm
from torchtrain.nn.rope import RopeConfig, build_rotary_table
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import MODEL_OUTPUT


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize(("width", "tokens"), [(4, 9), (4, 2), (1, 5)])
def test_the_convolution_is_torchs_depthwise_one_with_padding_before_the_sequence(width, tokens):
    x_BTNH, filter_NHW = torch.randn(2, tokens, 3, 5), torch.randn(3, 5, width)
    padded = F.pad(x_BTNH.flatten(2).mT, (width - 1, 0))
    expected = F.silu(F.conv1d(padded, filter_NHW.flatten(0, 1)[:, None], groups=15)).mT.unflatten(-1, (3, 5))
    assert relative_error(convolve(x_BTNH, filter_NHW, None), expected) <= MODEL_OUTPUT


def test_the_convolution_of_a_document_sees_no_other():
    x_BTNH, filter_NHW = torch.randn(1, 7, 2, 3), torch.randn(2, 3, 4)
    packed = convolve(x_BTNH, filter_NHW, torch.tensor([[0, 0, 1, 2, 2, 2, 2]]))
    alone = [convolve(part, filter_NHW, None) for part in x_BTNH.split([2, 1, 4], dim=1)]
    assert relative_error(packed, torch.cat(alone, dim=1)) <= MODEL_OUTPUT


def test_a_document_id_that_comes_back_is_another_document():
    segments = LocalDeltaNetCore().build_mask(torch.tensor([[5, 5, 2, 5], [1, 1, 1, 1]], dtype=torch.int32))
    assert segments is not None
    assert segments.tolist() == [[0, 0, 1, 2], [0, 0, 0, 0]]
    assert LocalDeltaNetCore().build_mask(None) is None


def test_a_few_tokens_without_gradients_go_one_by_one_and_come_out_the_same():
    config = DeltaNetConfig(
        hidden_size=12,
        num_key_heads=1,
        num_value_heads=2,
        key_head_dim=4,
        value_head_dim=4,
        conv_kernel_dim=3,
        norm_eps=1e-3,
    )
    calls = []

    def counted(*inputs, chunk_size):
        calls.append(chunk_size)
        return chunked(*inputs, chunk_size=chunk_size)

    layer = GatedDeltaNet(config, LocalDeltaNetCore(rule=counted, chunk_size=16))
    table = build_rotary_table(torch.arange(8)[None], RopeConfig(head_dim=4, theta=100.0))
    x_BTD = torch.randn(1, 8, 12)
    trained = layer(x_BTD, table, None)
    with torch.no_grad():
        assert relative_error(layer(x_BTD, table, None), trained) <= MODEL_OUTPUT
    assert calls == [16]


def test_a_zero_centred_norm_scales_by_one_plus_its_weight_in_fp32():
    norm, x = ZeroCentredRMSNorm(64, eps=1e-6), torch.randn(4, 64, dtype=torch.bfloat16)
    norm.weight.data.normal_(std=0.1)
    norm.to(torch.bfloat16)
    exact = F.rms_norm(x.double(), (64,), 1 + norm.weight.double(), 1e-6)
    assert torch.equal(norm(x), exact.to(torch.bfloat16))


def test_a_gated_norm_rounds_once():
    norm, (x, gate) = GatedRMSNorm(64, eps=1e-6), torch.randn(2, 4, 64, dtype=torch.bfloat16)
    norm.weight.data.normal_()
    exact = F.rms_norm(x.double(), (64,), norm.weight.double(), 1e-6) * F.silu(gate.double())
    assert torch.equal(norm(x, gate), exact.to(torch.bfloat16))


def test_partial_rotation_turns_the_first_values_and_leaves_the_rest():
    config = RopeConfig(head_dim=16, theta=100.0, partial_rotary_factor=0.5)
    positions_BT, x_BTNH = torch.arange(5)[None], torch.randn(1, 5, 2, 16)
    turned = build_rotary_table(positions_BT, config).rotate(x_BTNH)
    whole = build_rotary_table(positions_BT, RopeConfig(head_dim=8, theta=100.0)).rotate(x_BTNH[..., :8])
    assert torch.equal(turned[..., 8:], x_BTNH[..., 8:])
    assert torch.equal(turned[..., :8], whole)


def test_several_position_axes_need_sections():
    with pytest.raises(ValueError, match="do not fit the sections"):
        build_rotary_table(torch.zeros(3, 1, 4, dtype=torch.long), RopeConfig(head_dim=16, theta=100.0))


def test_decays_are_drawn_between_their_bounds_and_alike_for_every_split():
    rule = LogUniform(0.01, 16.0)
    whole = draw_rows(rule, seed=1, fqn="A_log", shape=(1000,), start=0, stop=1000)
    part = draw_rows(rule, seed=1, fqn="A_log", shape=(1000,), start=700, stop=1000)
    assert torch.equal(whole[700:], part)
    assert 0.01 <= whole.exp().min() < 0.5 < 15.5 < whole.exp().max() <= 16.0
    assert abs(float(whole.exp().mean()) - 8.0) < 0.5
