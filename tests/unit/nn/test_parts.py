from __future__ import annotations

from dataclasses import is_dataclass

import pytest
import torch
import torch.nn.functional as F

from torchtrain.nn.attention import Attention, AttentionConfig, SDPACore
from torchtrain.nn.feed_forward import FeedForward
from torchtrain.nn.flops import training_flops_per_token
from torchtrain.nn.rms_norm import RMSNorm
from torchtrain.nn.rope import Llama3Scaling, RopeConfig, build_rotary_table
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import MODEL_OUTPUT


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def test_norm_in_bf16_rounds_once():
    norm, x = RMSNorm(64, eps=1e-6), torch.randn(4, 64, dtype=torch.bfloat16)
    norm.weight.data.normal_()
    norm.to(torch.bfloat16)
    exact = F.rms_norm(x.double(), (64,), norm.weight.double(), 1e-6)
    assert torch.equal(norm(x), exact.to(torch.bfloat16))


def test_norm_with_fp32_weight_keeps_the_input_dtype_and_rounds_once():
    norm, x = RMSNorm(64, eps=1e-6), torch.randn(4, 64, dtype=torch.bfloat16)
    norm.weight.data.normal_()
    exact = F.rms_norm(x.double(), (64,), norm.weight.double(), 1e-6)
    assert torch.equal(norm(x), exact.to(torch.bfloat16))


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    config = RopeConfig(head_dim=16, theta=100.0)
    q_BTNH, k_BTNH = torch.randn(2, 1, 1, 1, 16).expand(2, 1, 9, 1, 16)
    scores = []
    for offset in (0, 5):
        table = build_rotary_table(torch.arange(offset, offset + 9)[None], config)
        q_rotated, k_rotated = table.rotate(q_BTNH), table.rotate(k_BTNH)
        assert relative_error(q_rotated.norm(dim=-1), q_BTNH.norm(dim=-1)) <= MODEL_OUTPUT
        scores.append(q_rotated[0, :, 0] @ k_rotated[0, :, 0].T)
    assert relative_error(scores[0], scores[1]) <= MODEL_OUTPUT


def test_positions_beyond_fp16_range_keep_neighbours_apart_in_bf16():
    table = build_rotary_table(torch.tensor([[100_000, 100_001]]), RopeConfig(head_dim=16, theta=500_000.0))
    assert table.cos_BT1F.dtype == torch.float32
    rotated = table.rotate(torch.ones(1, 2, 1, 16, dtype=torch.bfloat16))
    assert rotated.dtype == torch.bfloat16
    assert not torch.equal(rotated[0, 0], rotated[0, 1])


def test_the_table_is_opaque_to_those_who_cast_the_contents_of_containers():
    """FSDP's ``cast_forward_inputs`` walks dataclasses and pytrees; it must not round angles to bf16."""
    table = build_rotary_table(torch.arange(3)[None], RopeConfig(4, 10.0))
    assert torch.utils._pytree.tree_leaves(table) == [table]
    assert not is_dataclass(table)


def test_llama3_scaling_keeps_fast_and_stretches_slow_frequencies():
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    one = torch.ones(1, 1, dtype=torch.int64)
    plain = build_rotary_table(one, RopeConfig(128, 500_000.0)).sin_BT1F.asin()[0, 0, 0]
    scaled = build_rotary_table(one, RopeConfig(128, 500_000.0, scaling)).sin_BT1F.asin()[0, 0, 0]
    ratio = plain / scaled
    assert ratio[1:20].allclose(torch.ones(19), rtol=1e-5)
    assert ratio[-10:].allclose(torch.full((10,), 8.0), rtol=1e-5)
    assert (ratio[1:].diff() >= -1e-4).all()


def test_mask_allows_earlier_tokens_of_the_same_document_only():
    mask_B1TT = SDPACore().build_mask(torch.tensor([[4, 4, 9], [0, 1, 1]], dtype=torch.int32))
    assert mask_B1TT is not None
    assert mask_B1TT.tolist() == [
        [[[True, False, False], [True, True, False], [False, False, True]]],
        [[[True, False, False], [False, True, False], [False, True, True]]],
    ]
    assert SDPACore().build_mask(None) is None


def test_one_document_with_mask_equals_plain_causal():
    core = SDPACore()
    q_BTNH, k_BTKH, v_BTKH = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    mask = core.build_mask(torch.zeros(2, 5, dtype=torch.int32))
    assert relative_error(core(q_BTNH, k_BTKH, v_BTKH, mask), core(q_BTNH, k_BTKH, v_BTKH, None)) <= MODEL_OUTPUT


def test_an_installed_core_is_used():
    class Shifted(SDPACore):
        def __call__(self, q_BTNH, k_BTKH, v_BTKH, mask):
            return super().__call__(q_BTNH, k_BTKH, v_BTKH, mask) + 1

    attention = Attention(AttentionConfig(16, 4, 2, 4), SDPACore())
    x_BTD = torch.randn(1, 3, 16)
    table = build_rotary_table(torch.arange(3)[None], RopeConfig(4, 10.0))
    plain = attention(x_BTD, table, None)
    attention.core = Shifted()
    assert relative_error(attention(x_BTD, table, None), plain + attention.o_proj(torch.ones(16))) <= MODEL_OUTPUT


def test_feed_forward_is_swiglu():
    layer, x = FeedForward(8, 12), torch.randn(2, 3, 8)
    gate, up = x @ layer.gate_proj.weight.T, x @ layer.up_proj.weight.T
    expected = (gate * torch.sigmoid(gate) * up) @ layer.down_proj.weight.T
    assert relative_error(layer(x), expected) <= MODEL_OUTPUT


def test_flops_are_those_of_the_docstring():
    flops = training_flops_per_token(
        num_matmul_parameters=1000, num_layers=2, num_attention_heads=3, head_dim=5, seq_len=7
    )
    assert flops == 6 * 1000 + 12 * 2 * 3 * 5 * 7 / 2
