"""Each key of ``mix_precision`` changes the dtype that its row names, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.registry import load_spec, resolve_architecture
from tests.parity.harness import MODEL, make_global_batch
from tests.shared_ranks import SharedRanks
from torchtrain.config.load import load_job
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.nn.decoder_block import DecoderBlock
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.shares import split_batch
from torchtrain.trainer.run import Run, build_model

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class ReductionDtypes(TorchDispatchMode):
    """Collects the dtypes of tensors that are reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {"reduce_scatter": set(), "allreduce": set()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = str(func)
        for kind, dtypes in self.seen.items():
            if "c10d" in name and kind in name:
                tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
                dtypes.update(tensor.dtype for tensor in tensors)
        return func(*args, **(kwargs or {}))


def dtypes_of_one_step(*settings: str) -> dict[str, Any]:
    """Dtypes along one forward and backward of two ranks (one shard each, or two replicas)."""
    overrides = [
        f"fsdp_config.mix_precision.{setting}" for setting in settings if "=" in setting and "." not in setting
    ]
    others = [setting for setting in settings if "." in setting]
    job = load_job(None, [*MODEL, "training.micro_batch_size=4", *overrides, *others])
    topology = Topology.resolve(job, dist.get_world_size())
    meshes = build_meshes(topology, torch.device("cpu"))
    architecture = resolve_architecture("llama", "debug", job.model.overrides)
    model = build_model(Run(job, load_spec("llama"), architecture, meshes, is_main=False)).module
    seen: dict[str, Any] = {}
    block = next(module for module in model.modules() if isinstance(module, DecoderBlock))
    block.register_forward_hook(lambda _, args, output: seen.update(block_output=output.dtype))
    # Before FSDP's own cast the block sees what the caller passes; the first norm sees what arrived.
    block.input_layernorm.register_forward_pre_hook(lambda _, args: seen.update(block_input=args[0].dtype))
    block.mlp.up_proj.register_forward_pre_hook(lambda module, args: seen.update(compute=module.weight.dtype))
    with ReductionDtypes() as reductions:
        (batch, *_) = split_batch(
            make_global_batch(0, 8, 16), meshes.dp_rank, topology.dp_size, job.training.micro_batch_size
        )
        logits = model(batch.input_ids_BT, batch.positions_BT, batch.document_ids_BT)
        logits.float().square().mean().backward()
    seen["output"] = logits.dtype
    seen["stored"] = {parameter.dtype for parameter in model.parameters()}
    seen["gradient"] = {parameter.grad.dtype for parameter in model.parameters()}
    return seen | reductions.seen


DTYPES = (("float16", FP16), ("bfloat16", BF16), ("float32", FP32))
SETTINGS: tuple[tuple[str, ...], ...] = (
    (),
    *((f"param_dtype={name}",) for name, _ in DTYPES),
    *(("param_dtype=bfloat16", f"{key}={name}") for key in ("reduce_dtype", "output_dtype") for name, _ in DTYPES),
)
STEPS = SharedRanks(
    dtypes_of_one_step, {str(settings): (2, ("fsdp_config.dp_shard_size=2", *settings)) for settings in SETTINGS}
)


def on_two_shards(*settings: str) -> dict[str, Any]:
    return STEPS.results(str(settings), list(STEPS.rows))[0]


def test_all_null_casts_nothing() -> None:
    seen = on_two_shards()
    assert {seen[key] for key in ("compute", "block_input", "block_output", "output")} == {FP32}
    assert seen["reduce_scatter"] == seen["stored"] == seen["gradient"] == {FP32}


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_param_dtype_is_the_compute_dtype(name: str, dtype: torch.dtype) -> None:
    seen = on_two_shards(f"param_dtype={name}")
    assert seen["compute"] == seen["block_input"] == seen["output"] == dtype
    assert seen["stored"] == seen["gradient"] == {FP32}
    # Without a reduce_dtype gradients travel as they were computed.
    assert seen["reduce_scatter"] == {dtype}


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_reduce_dtype_is_the_dtype_of_the_reduce_scatter(name: str, dtype: torch.dtype) -> None:
    seen = on_two_shards("param_dtype=bfloat16", f"reduce_dtype={name}")
    assert seen["reduce_scatter"] == {dtype}
    assert seen["compute"] == BF16


def test_reduce_dtype_is_the_dtype_of_the_all_reduce_between_replicas() -> None:
    seen = run_ranks(
        dtypes_of_one_step, 4, "fsdp_config.dp_shard_size=2", "training.micro_batch_size=2", "reduce_dtype=bfloat16"
    )[0]
    assert seen["allreduce"] == {BF16}


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_output_dtype_is_the_dtype_that_units_return(name: str, dtype: torch.dtype) -> None:
    seen = on_two_shards("param_dtype=bfloat16", f"output_dtype={name}")
    assert seen["output"] == seen["block_output"] == dtype
    assert seen["compute"] == BF16


def test_cast_forward_inputs_casts_what_a_unit_is_given() -> None:
    # The blocks return fp32 here, so the next block is given fp32 and must cast it.
    assert on_two_shards("param_dtype=bfloat16", "output_dtype=float32")["block_input"] == BF16


def first_input_without_cast() -> str:
    try:
        return str(
            dtypes_of_one_step(
                "fsdp_config.dp_shard_size=2",
                "param_dtype=bfloat16",
                "output_dtype=float32",
                "cast_forward_inputs=false",
            )["block_input"]
        )
    except RuntimeError as error:
        return str(error)


def test_without_cast_forward_inputs_fsdp_casts_nothing() -> None:
    # The second block is given the first one's fp32 output as it is, and its bf16 weights refuse it.
    assert all("dtype" in said for said in run_ranks(first_input_without_cast, 2))


def rope_dtype() -> set[torch.dtype]:
    job = load_job(
        None,
        [
            *MODEL,
            "training.micro_batch_size=4",
            "fsdp_config.dp_shard_size=2",
            "fsdp_config.mix_precision.param_dtype=bfloat16",
        ],
    )
    topology = Topology.resolve(job, 2)
    meshes = build_meshes(topology, torch.device("cpu"))
    architecture = resolve_architecture("llama", "debug", job.model.overrides)
    model: nn.Module = build_model(Run(job, load_spec("llama"), architecture, meshes, is_main=False)).module
    seen: set[torch.dtype] = set()
    for block in (module for module in model.modules() if isinstance(module, DecoderBlock)):
        block.self_attn.register_forward_pre_hook(lambda _, args: seen.add(args[1].cos_BT1F.dtype))
    model(torch.zeros(1, 4, dtype=torch.long))
    return seen


def test_rotary_angles_stay_fp32_under_cast_forward_inputs() -> None:
    assert run_ranks(rope_dtype, 2)[0] == {FP32}
