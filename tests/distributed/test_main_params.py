"""fp32 main gradients and main parameters, on every way a gradient can travel."""

from __future__ import annotations

import logging
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.distributed.stored_run import StoredRun
from tests.shared_ranks import SharedRanks
from torchtrain.checkpoint.safe_reader import read_metadata
from torchtrain.config.optimization import OptimizerConfig
from torchtrain.distributed.fsdp2.main_grad import apply_main_grad, keep_gradients_in_fp32
from torchtrain.errors import CheckpointError
from torchtrain.optim.build import build_optimizer
from torchtrain.optim.main_params import MainParamOptimizer
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import FP32_TENSOR

PAIR = (
    "model.init_dtype=bfloat16",
    "optimizer.fp32_main_params=true",
    "fsdp_config.mix_precision={param_dtype: float32, reduce_dtype: float32, fp32_main_grad: true}",
)
"""Storage bf16, but fp32 compute: fast on a CPU, and every rounding that is left is one of storage."""

BF16_COMPUTE = "fsdp_config.mix_precision={param_dtype: bfloat16, reduce_dtype: float32, fp32_main_grad: true}"
MICRO_BATCHES = "training.micro_batch_size=2"

WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one rank": (1, ()),
    "one rank, bf16 compute": (1, (BF16_COMPUTE,)),
    "shard": (2, ("fsdp_config.dp_shard_size=2",)),
    "shard, bf16 compute": (2, ("fsdp_config.dp_shard_size=2", BF16_COMPUTE)),
    "replicate": (2, ()),
    "hsdp, every micro-batch reduced": (4, ("fsdp_config.dp_shard_size=2",)),
    "hsdp, last micro-batch reduced": (4, ("fsdp_config.dp_shard_size=2", "fsdp_config.requires_grad_sync=false")),
    "last micro-batch reduced": (2, ("fsdp_config.dp_shard_size=2", "fsdp_config.requires_grad_sync=false")),
    "fused, copy in": (
        2,
        ("fsdp_config.dp_shard_size=2", "fsdp_config.comm_fusion=true", "fsdp_config.comm_fusion_zero_copy=false"),
    ),
    "fused, zero copy": (2, ("fsdp_config.dp_shard_size=2", "fsdp_config.comm_fusion=true")),
    "offload": (2, ("fsdp_config.dp_shard_size=2", "fsdp_config.enable_offload=true")),
    "replicated parameter": (
        2,
        ("fsdp_config.dp_shard_size=2", "fsdp_config.replicate_params=[layers.0.input_layernorm.weight]"),
    ),
}


def train_pair(*overrides: str) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    run = StoredRun(*PAIR, MICRO_BATCHES, *overrides)
    run.train(2)
    return run.whole_tensors(), run.gradients


PAIRS = SharedRanks(train_pair, WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_mains_and_moments_are_fp32_and_the_weights_are_the_mains_rounded(
    way: str, chosen_rows: list[str]
) -> None:
    tensors, gradients = PAIRS.results(way, chosen_rows)[0]
    fqns = [name.removeprefix("model.") for name in tensors if name.startswith("model.")]
    assert all(gradients[step].keys() == set(fqns) for step in (0, 1))
    for fqn in fqns:
        assert all(step[fqn].dtype == torch.float32 for step in gradients)
        assert any(not torch.equal(step[fqn], step[fqn].bfloat16().float()) for step in gradients), "rounded on the way"
        assert tensors[f"optimizer.{fqn}.exp_avg"].dtype == torch.float32
        weight, main = tensors[f"model.{fqn}"], tensors[f"main.{fqn}"]
        assert (weight.dtype, main.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(weight, main.bfloat16())
        assert not torch.equal(main, weight.float())


@pytest.mark.parametrize("way", [way for way in WAYS if "one rank" not in way and "bf16" not in way and way != "shard"])
def test_every_way_trains_the_same_mains(way: str, chosen_rows: list[str]) -> None:
    expected, expected_gradients = PAIRS.results("shard", chosen_rows)[0]
    tensors, gradients = PAIRS.results(way, chosen_rows)[0]
    for fqn, gradient in expected_gradients[0].items():
        assert relative_error(gradients[0][fqn], gradient) < FP32_TENSOR, fqn
        assert relative_error(tensors[f"main.{fqn}"], expected[f"main.{fqn}"]) < FP32_TENSOR, fqn


def train_fp32_storage() -> dict[str, Tensor]:
    run = StoredRun(*PAIR, "model.init_dtype=float32", "fsdp_config.dp_shard_size=2")
    run.train(2)
    return run.whole_tensors()


def train_fp32_without_the_pair() -> dict[str, Tensor]:
    run = StoredRun("fsdp_config.dp_shard_size=2")
    run.train(2)
    return run.whole_tensors()


def test_a_parameter_that_is_fp32_already_is_its_own_main() -> None:
    with_pair = run_ranks(train_fp32_storage, 2)[0]
    assert not any(name.startswith("main.") for name in with_pair)
    without = run_ranks(train_fp32_without_the_pair, 2)[0]
    assert with_pair.keys() == without.keys()
    assert all(torch.equal(with_pair[name], without[name]) for name in without)


def save_and_go_on(folder: Path, *overrides: str) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    run = StoredRun(*PAIR, *overrides, folder=folder)
    run.train(2)
    run.save()
    saved = run.whole_tensors()
    return saved, run.train(2), run.whole_tensors()


def load_and_go_on(folder: Path, *overrides: str) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    run = StoredRun(*PAIR, "training.seed=1", *overrides, folder=folder, resume="auto")
    run.resume()
    loaded = run.whole_tensors()
    return loaded, run.train(2), run.whole_tensors()


@pytest.mark.parametrize("offload", ["false", "true"])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(tmp_path: Path, offload: str) -> None:
    overrides = ("fsdp_config.dp_shard_size=2", f"fsdp_config.enable_offload={offload}")
    _, scalars, tensors = run_ranks(save_and_go_on, 2, tmp_path, *overrides)[0]
    _, resumed_scalars, resumed = run_ranks(load_and_go_on, 2, tmp_path, *overrides)[0]
    assert resumed_scalars == scalars
    assert all(torch.equal(resumed[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(("world_size", "overrides"), [(1, ()), (4, ("fsdp_config.dp_shard_size=2",))])
def test_mains_saved_by_fsdp_arrive_bit_for_bit_on_another_topology(
    tmp_path: Path, world_size: int, overrides: tuple[str, ...]
) -> None:
    saved, *_ = run_ranks(save_and_go_on, 2, tmp_path, "fsdp_config.dp_shard_size=2")[0]
    loaded, scalars, _ = run_ranks(load_and_go_on, world_size, tmp_path, *overrides)[0]
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert all(torch.isfinite(torch.tensor(scalars)))


BF16_ONLY = (*PAIR[:1], "fsdp_config.dp_shard_size=2", "fsdp_config.mix_precision={param_dtype: float32}")


def save_without_mains(folder: Path) -> dict[str, Tensor]:
    run = StoredRun(*BF16_ONLY, folder=folder)
    run.train(2)
    run.save()
    return run.whole_tensors()


def load_with_warnings(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("torchtrain.checkpoint.checkpointer").addHandler(handler)
    loaded, *_ = load_and_go_on(folder, "fsdp_config.dp_shard_size=2")
    return loaded, said


def test_a_checkpoint_without_mains_warns_and_starts_them_from_its_weights(tmp_path: Path) -> None:
    saved = run_ranks(save_without_mains, 2, tmp_path)[0]
    loaded, said = run_ranks(load_with_warnings, 2, tmp_path)[0]
    assert any("holds no fp32 main parameters: they start from its low-precision weights" in line for line in said)
    for name, tensor in saved.items():
        assert torch.equal(loaded[name].to(tensor.dtype), tensor), name
        if name.startswith("model."):
            assert torch.equal(loaded[name.replace("model.", "main.")], tensor.float()), name


def load_without_mains(folder: Path) -> str:
    run = StoredRun(*BF16_ONLY, folder=folder, resume="auto")
    with pytest.raises(CheckpointError) as caught:
        run.resume()
    return str(caught.value)


def test_a_checkpoint_with_mains_is_refused_by_a_run_without(tmp_path: Path) -> None:
    run_ranks(save_and_go_on, 2, tmp_path, "fsdp_config.dp_shard_size=2")
    assert "main.embed_tokens.weight" in read_metadata(tmp_path / "step_00000002").state_dict_metadata
    assert "it has besides main." in run_ranks(load_without_mains, 2, tmp_path)[0]


def reduce_a_bf16_unit() -> list[tuple[torch.dtype, torch.dtype]]:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(3, 5, bias=False, dtype=torch.bfloat16)
    model.frozen = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    assert isinstance(model, FSDPModule)
    apply_main_grad(model)
    dtypes = []
    for _ in range(3):
        model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
        # An operation on the gradient goes by the dtype that its DTensor claims.
        dtypes.append((model.weight.grad.dtype, model.weight.grad.lerp_(model.weight.float(), 0.0).dtype))
        # Once in place, once with other parameter objects.
        state = {fqn: tensor.clone() for fqn, tensor in model.state_dict().items()}
        model.load_state_dict(state, assign=len(dtypes) == 2)
    assert model.frozen.grad is None
    return dtypes


def test_torch_still_reduces_as_the_main_gradient_expects() -> None:
    """Fails when the private parts of torch that ``main_grad`` relies on change."""
    assert run_ranks(reduce_a_bf16_unit, 2)[0] == [(torch.float32, torch.float32)] * 3


def load_into_a_run_with_mains(*overrides: str) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    run = StoredRun(*PAIR, MICRO_BATCHES, *overrides)
    run.train(1)
    before = run.whole_tensors()
    state = {fqn: tensor.detach().clone() for fqn, tensor in run.model.state_dict().items()}
    changed = "layers.0.mlp.up_proj.weight"
    state[changed] += 1
    run.model.load_state_dict(state)
    run.model.layers["1"].load_state_dict({"input_layernorm.weight": state["norm.weight"] + 2}, strict=False)
    after = run.whole_tensors()
    run.train(1)
    stepped = run.whole_tensors()
    for name, tensor in before.items():
        if not name.startswith("main."):
            continue
        fqn = name.removeprefix("main.")
        if fqn in (changed, "layers.1.input_layernorm.weight"):
            assert torch.equal(after[name], after[f"model.{fqn}"].float()), name
            assert not torch.equal(after[name], tensor), name
            assert relative_error(stepped[name], after[name]) < 0.1, name
        else:
            assert torch.equal(after[name], tensor), name
    with pytest.raises(RuntimeError) as caught:
        run.model.load_state_dict(state, assign=True)
    return after, stepped, str(caught.value)


@pytest.mark.parametrize("way", ["one rank", "hsdp, every micro-batch reduced", "fused, zero copy"])
def test_mains_follow_weights_that_are_loaded_later_and_refuse_other_objects(way: str) -> None:
    world_size, overrides = WAYS[way]
    *_, message = run_ranks(load_into_a_run_with_mains, world_size, *overrides)[0]
    assert "load without assign, or build the optimizer afterwards" in message


def test_a_copy_of_the_model_is_loaded_without_touching_mains() -> None:
    model = nn.Linear(3, 5, dtype=torch.bfloat16)
    optimizer = build_optimizer(
        model, OptimizerConfig(fp32_main_params=True, weight_decay=0.0), device=torch.device("cpu")
    )
    assert isinstance(optimizer, MainParamOptimizer)
    mains = [main.clone() for main in optimizer.main_params.values()]
    copied = deepcopy(model)
    copied.load_state_dict({"weight": torch.ones(5, 3), "bias": torch.ones(5)}, assign=True)
    assert all(torch.equal(main, kept) for main, kept in zip(optimizer.main_params.values(), mains, strict=True))


def test_main_gradients_survive_other_parameter_objects_without_fsdp() -> None:
    model = keep_gradients_in_fp32(nn.Linear(3, 5, bias=False, dtype=torch.bfloat16))
    before = model.weight
    model.load_state_dict({"weight": torch.ones(5, 3, dtype=torch.bfloat16)}, assign=True)
    assert model.weight is not before
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32


def train_muon(*overrides: str) -> dict[str, Tensor]:
    run = StoredRun(*PAIR, "optimizer._target_=torchtrain.optim.muon.Muon", *overrides)
    run.train(2)
    return run.whole_tensors()


def test_muon_steps_the_mains_too() -> None:
    tensors = run_ranks(train_muon, 2, "fsdp_config.dp_shard_size=2")[0]
    expected = run_ranks(train_muon, 4, "fsdp_config.dp_shard_size=2", "fsdp_config.enable_offload=true")[0]
    assert any("momentum" in name for name in tensors)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        if name.startswith("model."):
            main = tensors[name.replace("model.", "main.")]
            assert torch.equal(tensor, main.bfloat16()), name
            assert not torch.equal(main, tensor.float()), name
        else:
            assert tensor.dtype == torch.float32, name
            assert relative_error(expected[name], tensor) < FP32_TENSOR, name
