"""What a rank keeps for backward falls with the number of context-parallel ranks. ``pytest -s`` prints the bytes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from models.registry import load_spec, resolve_architecture
from torchtrain.config.parallel import CpMode
from torchtrain.distributed.context_parallel.apply import apply_context_parallel
from torchtrain.distributed.context_parallel.sequence_layout import resolve_sequence_layout
from torchtrain.testing.ranks import run_ranks

SEQ_LEN = 1024
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 4, 16
SIZES = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": NUM_LAYERS}
SIZES |= {"num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_HEADS, "head_dim": HEAD_DIM}


def saved_bytes(mode: CpMode, is_packed: bool) -> int:
    """Bytes of distinct memory that one forward keeps for backward, parameters left out."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model = load_spec("llama").build(resolve_architecture("llama", "debug", SIZES))
    if size > 1:
        apply_context_parallel(model, mode, init_device_mesh("cpu", (size,)))
    layout = resolve_sequence_layout(mode, size, rank)
    places = torch.arange(SEQ_LEN)[None]
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mine = layout.take(places)
        out = model(mine % 101, mine, places // 300 if is_packed else None)
    total = sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in own)
    out.sum().backward()
    return total


@cache
def bytes_on_one_rank() -> int:
    return run_ranks(saved_bytes, 1, "ring", False)[0]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("mode", ["ulysses", "allgather", "ring"])
def test_activations_of_a_rank_fall_with_the_ranks(mode: CpMode, is_packed: bool) -> None:
    gathered = NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM * SEQ_LEN * 4 if mode == "allgather" else 0
    for cp_size in (2, 4):
        largest = max(run_ranks(saved_bytes, cp_size, mode, is_packed))
        print(f"\n{mode}, packed {is_packed}: cp 1 {bytes_on_one_rank():,} B, cp {cp_size} {largest:,} B")
        # A tenth for what is per row or per rank: log-denominators, document ids.
        assert largest <= bytes_on_one_rank() / cp_size * 1.1 + gathered
