"""``replicate_params`` together with everything else that touches a unit: the same numbers as without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.distributed.stored_run import StoredRun
from tests.shared_ranks import SharedRanks
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import BF16_SCALAR, FP32_SCALAR, FP32_TENSOR

SHARD = "fsdp_config.dp_shard_size=2"
OFFLOAD = "fsdp_config.enable_offload=true"
RECOMPUTE = "activation_checkpoint.mode=full"
MUON = "optimizer._target_=torchtrain.optim.muon.Muon"
BF16_COMPUTE = "fsdp_config.mix_precision={param_dtype: bfloat16, reduce_dtype: float32}"
PAIR = (
    "model.init_dtype=bfloat16",
    "optimizer.fp32_main_params=true",
    "fsdp_config.mix_precision={param_dtype: float32, reduce_dtype: float32, fp32_main_grad: true}",
)
FROZEN = "layers.1.mlp.down_proj.weight"
WHOLE_FQNS = ("layers.0.mlp.up_proj.weight", FROZEN, "norm.weight", "embed_tokens.weight")
WHOLE = f"fsdp_config.replicate_params=[{', '.join(WHOLE_FQNS)}]"

# Each set on HSDP with accumulation: whole parameters are reduced over all four ranks, the others over two and two.
SETS: dict[str, tuple[str, ...]] = {
    "bf16 compute, recompute, offload": (BF16_COMPUTE, RECOMPUTE, OFFLOAD),
    "main params": (*PAIR, "fsdp_config.requires_grad_sync=false"),
    "main params, muon, offload, recompute, fused": (*PAIR, MUON, OFFLOAD, RECOMPUTE, "fsdp_config.comm_fusion=true"),
}


Trained = tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor], dict[str, bool]]


def train(*overrides: str) -> Trained:
    run = StoredRun(SHARD, "training.micro_batch_size=1", *overrides, frozen=(FROZEN,))
    scalars = run.train(2)
    parameters = dict(run.model.named_parameters())
    is_whole = {
        fqn: isinstance(p.data, DTensor) and p.data.to_local().shape == p.shape for fqn, p in parameters.items()
    }
    assert parameters[FROZEN].grad is None
    return scalars, run.gradients, run.whole_tensors(), is_whole


def train_both_ways(*overrides: str) -> tuple[Trained, Trained]:
    return train(*overrides), train(*overrides, WHOLE)


RUNS = SharedRanks(train_both_ways, {name: (4, overrides) for name, overrides in SETS.items()})


@pytest.mark.parametrize("name", SETS)
def test_whole_parameters_train_as_sharded_ones_do(name: str, chosen_rows: list[str]) -> None:
    results = RUNS.take(name, chosen_rows)
    scalars, gradients, tensors, _ = results[0][0]
    outcomes = [with_whole for _, with_whole in results]
    whole_scalars, whole_gradients, whole_tensors, is_whole = outcomes[0]
    assert all(is_whole[fqn] for fqn in WHOLE_FQNS)
    assert FROZEN not in gradients[0]
    # With bf16 compute the second step starts from weights that differ by an order of sums, which bf16 may round apart.
    is_low = BF16_COMPUTE in SETS[name]
    for ours, theirs in zip(whole_scalars, scalars, strict=True):
        assert relative_error(ours, theirs) <= (BF16_SCALAR if is_low else FP32_SCALAR)
    for step in (0,) if is_low else (0, 1):
        assert whole_gradients[step].keys() == gradients[step].keys()
        for fqn, gradient in gradients[step].items():
            assert relative_error(whole_gradients[step][fqn], gradient) <= FP32_TENSOR, (step, fqn)
    assert whole_tensors.keys() == tensors.keys()
    for other in outcomes[1:]:
        assert all(torch.equal(other[2][fqn], tensor) for fqn, tensor in whole_tensors.items())
    if is_low:
        return
    for fqn, tensor in tensors.items():
        if not (PAIR[0] in SETS[name] and fqn.startswith("model.")):  # Mains that differ by 1e-7 may round apart.
            assert relative_error(whole_tensors[fqn], tensor) <= FP32_TENSOR, fqn


def save(folder: Path, *overrides: str) -> dict[str, Tensor]:
    run = StoredRun(*overrides, folder=folder, frozen=(FROZEN,))
    run.train(1)
    run.save()
    return run.whole_tensors()


def load_and_save(source: Path, target: Path, *overrides: str) -> tuple[dict[str, Tensor], list[float]]:
    run = StoredRun(*overrides, "training.seed=1", folder=source, resume="auto", frozen=(FROZEN,))
    run.resume()
    loaded = run.whole_tensors()
    again = StoredRun(*overrides, "training.seed=2", folder=target, frozen=(FROZEN,))
    again.model, again.optimizer, again.num_steps = run.model, run.optimizer, run.num_steps
    again.save()
    return loaded, run.train(1)


def test_a_checkpoint_travels_from_sharded_to_whole_parameters_and_back(tmp_path: Path) -> None:
    common = (SHARD, "training.micro_batch_size=2", *PAIR, MUON, OFFLOAD)
    first, second, third = (tmp_path / name for name in ("sharded", "whole", "sharded_again"))
    saved = run_ranks(save, 2, first, *common)[0]
    scalars = []
    for ranks, source, target, whole in ((4, first, second, (WHOLE,)), (2, second, third, ())):
        for loaded, after in run_ranks(load_and_save, ranks, source, target, *common, *whole):
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
            scalars.append(after)
    for after in scalars:
        assert relative_error(torch.tensor(after), torch.tensor(scalars[0])) <= FP32_SCALAR
