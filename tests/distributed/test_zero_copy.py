"""Shards as views of one buffer: who writes into them, what puts other memory under them, and what falls back."""

from __future__ import annotations

import copy
import io
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.distributed.checkpoint_cases import Run
from tests.shared_ranks import SharedRanks
from torchtrain.checkpoint.layout import checkpoint_path
from torchtrain.config.fsdp import FSDP2Config
from torchtrain.distributed.fsdp2.comm_fusion import apply_comm_fusion
from torchtrain.distributed.fsdp2.param_group_internals import ZeroCopyParamGroup
from torchtrain.testing.ranks import run_ranks

ZERO_COPY = FSDP2Config(comm_fusion=True)
COPY_IN = FSDP2Config(comm_fusion=True, comm_fusion_zero_copy=False)


class Block(nn.Module):
    """5 rows over 2 ranks are 3 and 2; the one row of ``scale`` is rank 0's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)
        self.down = nn.Linear(5, 6)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


def build_plain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 3))


def shard(model: nn.Sequential, config: FSDP2Config = ZERO_COPY, **options: object) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for module in (model[0], model[1], model):
        fully_shard(module, mesh=mesh, **options)
    apply_comm_fusion(model, config)
    return model


def groups(model: nn.Module) -> list[ZeroCopyParamGroup]:
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for state in states for group in state._fsdp_param_groups]


def assert_views(model: nn.Module) -> None:
    """Every parameter that the modules hold lies in its group's buffer, one after another."""
    cast(FSDPModule, model).reshard()
    for group in groups(model):
        start = group._flat_shards.buffer.data_ptr()
        for param in group.fsdp_params:
            assert param._sharded_param_data.data_ptr() == start
            local = cast(DTensor, param.sharded_param).to_local()
            assert local.numel() == 0 or local.data_ptr() == start
            start += local.itemsize * param.padded_sharded_param_size.numel()
    held = {id(parameter) for parameter in model.parameters()}
    assert held == {id(param.sharded_param) for group in groups(model) for param in group.fsdp_params}


INPUT = torch.linspace(-1, 1, 24).reshape(4, 6)


def step(model: nn.Module, lr: float = 0.1) -> Tensor:
    """One step of SGD on the same batch everywhere; the mean over ranks is then the gradient itself, to the bit."""
    if isinstance(model, FSDPModule):
        model.reshard()  # After an evaluation the root's parameters are whole, and not what an optimizer is made of.
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loss = model(INPUT.to(next(model.parameters()).dtype)).pow(2).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def whole(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, FSDPModule):
        model.reshard()
    tensors = {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}
    return {fqn: t.full_tensor() if isinstance(t, DTensor) else t.clone() for fqn, t in tensors.items()}


def assert_trains_like(model: nn.Module, plain: nn.Module) -> None:
    """The sharded model computes from the plain one's weights and steps to the same ones."""
    for _ in range(2):
        assert torch.equal(step(model), step(plain))
        expected = whole(plain)
        assert [fqn for fqn, tensor in whole(model).items() if not torch.equal(tensor, expected[fqn])] == []


# --- who writes


def step_and_look() -> None:
    model, plain = shard(build_plain()), build_plain()
    held = list(model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(3):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            m(INPUT).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_views(model)
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    for fqn, tensor in whole(plain).items():
        torch.testing.assert_close(whole(model)[fqn], tensor, rtol=1e-6, atol=1e-7)


def test_optimizer_step_updates_view_backed_storage() -> None:
    run_ranks(step_and_look, 2)


def flatten_without_doubling(on_meta: bool) -> None:
    with torch.device("meta" if on_meta else "cpu"):
        model = build_plain()
    shard(model)
    if on_meta:
        model.to_empty(device="cpu")
        model.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    params = [param for group in groups(model) for param in group.fsdp_params]
    shards = [tensor for param in params for tensor in (param._sharded_param_data, param._sharded_local_tensor)]
    old = [weakref.ref(tensor) for tensor in shards]
    del shards
    before = live_storage_bytes(model)
    with torch.no_grad():
        model(INPUT)
    assert_views(model)
    assert live_storage_bytes(model) == before
    assert [ref() for ref in old if ref() is not None] == []
    assert before == 4 * sum(param.padded_sharded_param_size.numel() for param in params)


def live_storage_bytes(model: nn.Module) -> int:
    """Bytes behind the shards: each storage once."""
    cast(FSDPModule, model).reshard()
    sizes = {}
    for group in groups(model):
        for param in group.fsdp_params:
            for tensor in (param._sharded_param_data, param._sharded_local_tensor):
                if tensor.untyped_storage().nbytes():
                    sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


@pytest.mark.parametrize("on_meta", [False, True])
def test_old_storages_are_freed(on_meta: bool) -> None:
    run_ranks(flatten_without_doubling, 2, on_meta)


# --- what puts other memory under a parameter


def replace_in_place(model: nn.Sequential, other: nn.Sequential) -> None:
    model.load_state_dict(other.state_dict())


def replace_objects(model: nn.Sequential, other: nn.Sequential) -> None:
    model.load_state_dict(other.state_dict(), assign=True)


def replace_some_objects(model: nn.Sequential, other: nn.Sequential) -> None:
    state = {fqn: tensor for fqn, tensor in other.state_dict().items() if "up" in fqn}
    model.load_state_dict(state, assign=True, strict=False)
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            parameter.copy_(other.get_parameter(fqn))


@torch.no_grad()
def set_storage(model: nn.Sequential, other: nn.Sequential) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        cast(DTensor, mine)._local_tensor.set_(theirs.to_local().clone())


@torch.no_grad()
def set_data_of_local(model: nn.Sequential, other: nn.Sequential) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        cast(DTensor, mine)._local_tensor.data = theirs.to_local().clone()


@torch.no_grad()
def write_through_data(model: nn.Sequential, other: nn.Sequential) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        mine.data.copy_(theirs)


def materialize_again(model: nn.Sequential, other: nn.Sequential) -> None:
    model.to_empty(device="cpu")
    replace_in_place(model, other)


SURGERIES: dict[str, Callable] = {
    surgery.__name__: surgery
    for surgery in (
        replace_in_place,
        replace_objects,
        replace_some_objects,
        set_storage,
        set_data_of_local,
        write_through_data,
        materialize_again,
    )
}


def operate(surgery: Callable, is_laid_out: bool) -> None:
    model = shard(build_plain())
    if is_laid_out:
        step(model)
        model.zero_grad()
        assert_views(model)
    cast(FSDPModule, model).reshard()
    surgery(model, shard(build_plain(seed=1), COPY_IN))
    assert_trains_like(model, build_plain(seed=1))
    assert_views(model)


OPERATED = {
    is_laid_out: SharedRanks(operate, {name: (2, (surgery, is_laid_out)) for name, surgery in SURGERIES.items()})
    for is_laid_out in (False, True)
}


@pytest.mark.parametrize("surgery", SURGERIES)
@pytest.mark.parametrize("is_laid_out", [False, True])
def test_weights_from_elsewhere_are_trained(surgery: str, is_laid_out: bool, chosen_rows: list[str]) -> None:
    OPERATED[is_laid_out].take(surgery, chosen_rows)


def exchange_weights() -> None:
    model, plain = shard(build_plain()), build_plain()
    step(model), step(plain)
    model.zero_grad(), plain.zero_grad()
    cast(FSDPModule, model).reshard()
    state = model.state_dict()
    exchanged = state | {"0.up.weight": state["1.up.weight"], "1.up.weight": state["0.up.weight"]}
    model.load_state_dict(exchanged, assign=True)
    plain[0].up.weight, plain[1].up.weight = plain[1].up.weight, plain[0].up.weight
    assert_trains_like(model, plain)
    assert_views(model)


def test_weights_that_trade_their_places_in_the_buffers_are_trained() -> None:
    run_ranks(exchange_weights, 2)


def change_dtype() -> None:
    model, plain = shard(build_plain()), build_plain()
    step(model), step(plain)
    model.zero_grad(), plain.zero_grad()
    wider = shard(build_plain().double())
    wider.load_state_dict({fqn: distribute_like(t, wider, fqn) for fqn, t in whole(model).items()})
    assert_trains_like(wider, plain.double())
    assert_views(wider)


def distribute_like(tensor: Tensor, model: nn.Module, fqn: str) -> DTensor:
    target = cast(DTensor, model.get_parameter(fqn))
    return distribute_tensor(tensor.to(target.dtype), target.device_mesh, target.placements)


def test_other_dtypes_get_a_buffer_of_their_own() -> None:
    run_ranks(change_dtype, 2)


def nothing_is_laid_out_twice() -> None:
    model = shard(build_plain())
    step(model)
    buffers = [group._flat_shards for group in groups(model)]
    for _ in range(2):
        step(model)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    step(model)
    assert all(group._flat_shards is flat for group, flat in zip(groups(model), buffers, strict=True))


def test_the_buffer_stays_while_nothing_replaces_it() -> None:
    run_ranks(nothing_is_laid_out_twice, 2)


def copy_state() -> None:
    model = shard(build_plain())
    step(model)
    cast(FSDPModule, model).reshard()
    state = copy.deepcopy(model.state_dict())
    expected = whole(model)
    step(model, lr=1.0)  # the copy does not change with it
    assert all(torch.equal(state[fqn].full_tensor(), tensor) for fqn, tensor in expected.items())
    stream = io.BytesIO()
    cast(FSDPModule, model).reshard()
    torch.save({fqn: tensor.to_local() for fqn, tensor in model.state_dict().items()}, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    assert all(torch.equal(loaded[fqn], tensor.to_local()) for fqn, tensor in model.state_dict().items())


def test_a_state_dict_can_be_copied_and_pickled() -> None:
    run_ranks(copy_state, 2)


# --- checkpoints

WIDTH = 501


def save_and_resume(folder: str, config: dict[str, bool], keys: dict[str, object]) -> tuple[list[float], int]:
    run = build_run(folder, config, seed=0, **keys)
    run.train(3)
    run.save()
    run.checkpointer.wait()
    expected = run.train(3)
    saved = checkpoint_path(Path(folder), 3)
    resumed = build_run(f"{folder}_resumed", config, seed=1, resume=str(saved))
    assert resumed.train(1) != expected[:1]  # also lays the buffers out before the values arrive
    resumed.checkpointer.resume(resumed.model, resumed.optimizer)
    if config.get("comm_fusion_zero_copy"):
        assert_views(resumed.model)
    assert resumed.train(3) == expected
    return expected, sum(path.stat().st_size for path in saved.rglob("*.distcp"))


def build_run(folder: str, config: dict[str, bool], *, seed: int, **keys: object) -> Run:
    run = Run("fsdp2", Path(folder), width=WIDTH, seed=seed, **keys)
    apply_comm_fusion(run.model, FSDP2Config(**config))
    return run


@pytest.mark.parametrize("keys", [{}, {"async_save": True}], ids=["sync", "async"])
def test_a_checkpoint_holds_shards_not_buffers_and_resumes_to_the_bit(tmp_path: Path, keys: dict[str, object]) -> None:
    results = {}
    for is_zero_copy in (False, True):
        config = {"comm_fusion": True, "comm_fusion_zero_copy": is_zero_copy}
        results[is_zero_copy] = run_ranks(save_and_resume, 2, str(tmp_path / str(is_zero_copy)), config, keys)[0]
    (losses, size), (losses_of_views, size_of_views) = results[False], results[True]
    assert losses_of_views == losses
    assert size_of_views == size


# --- the ways of a forward


def gather_ahead_and_recover() -> None:
    model, plain = shard(build_plain()), build_plain()
    handle = cast(FSDPModule, model[1]).unshard(async_op=True)
    assert handle is not None
    handle.wait()
    assert torch.equal(model(INPUT), plain(INPUT))
    cast(FSDPModule, model[1]).reshard()
    assert_trains_like(model, plain)

    def fail(module: nn.Module, args: object) -> None:
        raise ValueError("a bad batch")

    hook = model[1].up.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="bad batch"):
        model(INPUT)
    hook.remove()
    cast(FSDPModule, model).reset_iter_state()
    model.zero_grad(), plain.zero_grad()
    assert_trains_like(model, plain)
    assert_views(model)


def test_explicit_unshard_and_recovery_from_a_failed_forward() -> None:
    run_ranks(gather_ahead_and_recover, 2)


def evaluate_between_load_and_step() -> None:
    model, plain = shard(build_plain()), build_plain()
    with torch.no_grad():
        assert torch.equal(model(INPUT), plain(INPUT))
    assert_trains_like(model, plain)
    cast(FSDPModule, model).reshard()
    replace_objects(model, shard(build_plain(seed=1), COPY_IN))
    plain = build_plain(seed=1)
    with torch.inference_mode():
        assert torch.equal(model(INPUT), plain(INPUT))
    assert_trains_like(model, plain)
    assert_views(model)


def test_an_evaluation_may_come_first() -> None:
    run_ranks(evaluate_between_load_and_step, 2)


class CountingAllGather(DefaultAllGather):
    calls = 0
    allocations = 0

    def allocate(self, *args: object, **kwargs: object) -> Tensor:
        self.allocations += 1
        return super().allocate(*args, **kwargs)

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        return super().__call__(*args, **kwargs)


def gather_with_own_communicator() -> None:
    model, plain = shard(build_plain()), build_plain()
    comm = CountingAllGather()
    for module in (model[0], model[1], model):
        module.set_custom_all_gather(comm)
    assert torch.equal(step(model), step(plain))
    assert (comm.calls, comm.allocations) == (5, 5)


def test_a_custom_all_gather_is_used() -> None:
    run_ranks(gather_with_own_communicator, 2)


# --- what falls back, with one line


def train_and_listen(variant: str, config: FSDP2Config) -> tuple[list[str], int, dict[str, Tensor]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchtrain.distributed.fsdp2.comm_fusion")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    plain = build_plain()
    options: dict[str, object] = {}
    if variant == "mixed dtypes":
        for block in plain[:2]:
            block.up.bias = nn.Parameter(block.up.bias.detach().bfloat16(), requires_grad=False)
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float32)
    elif variant == "frozen":
        plain[0].requires_grad_(False)
        plain[1].down.requires_grad_(False)
    elif variant == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = shard(plain, config, **options)
    for _ in range(2):
        step(model)
    adopted = sum(isinstance(group, ZeroCopyParamGroup) for group in groups(model))
    return lines, adopted, whole(model)


@pytest.mark.parametrize(
    ("variant", "world_size", "num_adopted", "line"),
    [
        ("mixed dtypes", 2, 1, "2 of 3 units copy shards in all the same (shards of several dtypes in 0)"),
        ("offload", 2, 0, "3 of 3 units copy shards in all the same (offloaded shards in the root)"),
        ("frozen", 2, 3, None),
        ("one rank holds all", 1, 0, None),
    ],
)
def test_what_cannot_share_a_buffer_copies_in_and_says_so_once(
    variant: str, world_size: int, num_adopted: int, line: str | None
) -> None:
    shared = run_ranks(train_and_listen, world_size, variant, ZERO_COPY)
    copied = run_ranks(train_and_listen, world_size, variant, COPY_IN)
    for (lines, adopted, weights), (_, _, expected) in zip(shared, copied, strict=True):
        assert adopted == num_adopted
        assert lines == ([f"comm_fusion_zero_copy: {line}"] if line else [])
        assert all(torch.equal(weights[fqn], tensor) for fqn, tensor in expected.items())
