"""What a family's table makes of a meta model, and which tables and sizes are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from models.llama.model import build_llama
from models.llama.parallelize import TENSOR_PARALLEL_TABLE
from models.registry import resolve_architecture
from torchtrain.distributed.tensor_parallel.plan import Style, TensorParallelPlan, plan_tensor_parallel
from torchtrain.errors import ConfigError
from torchtrain.nn.decoder import Decoder


def meta_llama(**overrides: object) -> Decoder:
    with torch.device("meta"):
        return build_llama(resolve_architecture("llama", "debug", {"num_hidden_layers": 1, **overrides}))


def plan(model: nn.Module, *, tp_size: int = 2, is_sequence_parallel: bool = False) -> TensorParallelPlan:
    return plan_tensor_parallel(
        model, TENSOR_PARALLEL_TABLE, tp_size=tp_size, is_sequence_parallel=is_sequence_parallel
    )


def test_every_parameter_of_a_llama_gets_its_place():
    planned = plan(meta_llama(attention_bias=True))
    rows, columns = Shard(0), Shard(1)
    assert {parameter.fqn: parameter.placement for parameter in planned.parameters} == {
        "embed_tokens.weight": rows,
        **{f"layers.0.self_attn.{name}_proj.{part}": rows for name in "qkv" for part in ("weight", "bias")},
        "layers.0.self_attn.o_proj.weight": columns,
        "layers.0.self_attn.o_proj.bias": Replicate(),
        "layers.0.mlp.gate_proj.weight": rows,
        "layers.0.mlp.up_proj.weight": rows,
        "layers.0.mlp.down_proj.weight": columns,
        "layers.0.input_layernorm.weight": None,
        "layers.0.post_attention_layernorm.weight": None,
        "norm.weight": None,
        "lm_head.weight": rows,
    }
    assert "norm.weight" not in planned.placements


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_gradients_of_norms_are_partial_only_where_ranks_see_their_own_tokens(is_sequence_parallel):
    planned = plan(meta_llama(), is_sequence_parallel=is_sequence_parallel)
    partial = [parameter.fqn for parameter in planned.parameters if parameter.is_gradient_partial]
    norms = [f"layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")]
    assert partial == ([*norms, "norm.weight"] if is_sequence_parallel else [])


def test_both_names_of_a_tied_weight_are_planned():
    planned = plan(meta_llama(tie_word_embeddings=True))
    assert planned.placements["embed_tokens.weight"] == planned.placements["lm_head.weight"] == Shard(0)


def test_a_stage_is_planned_as_what_it_is_a_part_of():
    model = meta_llama()
    whole = plan(model).placements
    model.embed_tokens = None
    stage = plan(model).placements
    assert stage == {fqn: placement for fqn, placement in whole.items() if not fqn.startswith("embed_tokens")}


def test_a_parameter_that_the_table_forgets_is_named():
    model = meta_llama()
    model.layers["0"].self_attn.gate = nn.Linear(4, 4, bias=False, device="meta")
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.gate\.weight.*must be covered"):
        plan(model)


def test_sizes_that_do_not_divide_are_named_with_the_nearest():
    with pytest.raises(ConfigError) as caught:
        plan(meta_llama(intermediate_size=38, vocab_size=101), tp_size=4)
    faults = [fault for fault in caught.value.faults if "mlp" in fault.rule]
    assert len(caught.value.faults) == len(faults) == 3
    assert {fault.fix for fault in faults} == {"make that size 36 or 40"}


def test_tied_modules_with_different_layouts_are_refused():
    table = {**TENSOR_PARALLEL_TABLE, "lm_head": Style.TOKENWISE}
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight, lm_head\.weight.*one tied parameter"):
        plan_tensor_parallel(meta_llama(tie_word_embeddings=True), table, tp_size=2, is_sequence_parallel=False)
