"""Plans applied on real ranks: what stays whole, what is borrowed from the root, and layouts that came before FSDP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from models.registry import load_spec, resolve_architecture
from tests.parity.harness import MODEL, make_global_batch
from torchtrain.config.load import load_job
from torchtrain.distributed.fsdp2.manager import FSDP2Manager
from torchtrain.distributed.fsdp2.shared_parameters import held_by_root
from torchtrain.distributed.fsdp2.source_layout import SourceLayout, check_source_layouts
from torchtrain.distributed.gradient_norm import global_gradient_norm
from torchtrain.distributed.meshes import Meshes, build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.errors import ConfigError
from torchtrain.tasks.pretrain import PretrainTask
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.shares import split_batch, whole_tensor
from torchtrain.testing.tolerances import FP32_TENSOR
from torchtrain.trainer.run import Run, build_model

CPU = torch.device("cpu")
WHOLE = "layers.0.mlp.up_proj.weight"


def build(*overrides: str) -> tuple[Run, nn.Module]:
    job = load_job(None, [*MODEL, "training.micro_batch_size=1", *overrides])
    meshes = build_meshes(Topology.resolve(job, dist.get_world_size()), CPU)
    architecture = resolve_architecture("llama", "debug", job.model.overrides)
    run = Run(job, load_spec("llama"), architecture, meshes, is_main=False)
    return run, build_model(run).module


def shapes_of_whole_parameter(*overrides: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    _, model = build(f"fsdp_config.replicate_params=[{WHOLE}]", *overrides)
    whole, sharded = model.get_parameter(WHOLE), model.get_parameter("layers.0.mlp.gate_proj.weight")
    return tuple(whole.shape), tuple(whole.to_local().shape), tuple(sharded.to_local().shape)


@pytest.mark.parametrize(("world_size", "shard"), [(2, 2), (4, 4), (4, 2)])
def test_a_replicated_parameter_has_its_full_shape_on_every_rank(world_size: int, shard: int) -> None:
    for rank, (shape, local, neighbour) in enumerate(
        run_ranks(shapes_of_whole_parameter, world_size, f"fsdp_config.dp_shard_size={shard}")
    ):
        assert local == shape == (37, 30)
        assert neighbour == (len(torch.arange(37).chunk(shard)[rank % shard]), 30)


def replicated_values_after_a_step() -> Tensor:
    run, model = build(f"fsdp_config.replicate_params=[{WHOLE}]", "fsdp_config.dp_shard_size=2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    whole_batch = make_global_batch(0, 8, 16)
    for batch in split_batch(whole_batch, run.meshes.dp_rank, run.meshes.topology.dp_size, 2)[:1]:
        PretrainTask().token_losses(model, batch).sum().backward()
    optimizer.step()
    return model.get_parameter(WHOLE).to_local().detach().clone()


def test_replicas_are_bitwise_equal_after_an_update() -> None:
    first, *others = run_ranks(replicated_values_after_a_step, 4)
    assert all(torch.equal(first, other) for other in others)


class TwiceUsed(nn.Module):
    """A model of the zoo in which two modules share one matrix."""

    def __init__(self, model: nn.Module, first: str, second: str) -> None:
        super().__init__()
        self.model = model
        # Never called; what counts is that its weight has its first name in the root and another inside a block.
        model.layers["1"].extra_head = nn.Linear(30, 101, bias=False)
        model.get_submodule(second).weight = model.get_submodule(first).weight

    def forward(self, **arguments: Tensor) -> Tensor:
        return self.model(**arguments)


def gradients_with_a_matrix_used_twice(first: str, second: str, is_sharded: bool) -> tuple[dict[str, Tensor], bool]:
    job = load_job(None, [*MODEL, "training.micro_batch_size=1", f"fsdp_config.dp_shard_size={dist.get_world_size()}"])
    meshes = build_meshes(Topology.resolve(job, dist.get_world_size()), CPU)
    architecture = resolve_architecture("llama", "debug", job.model.overrides)
    torch.manual_seed(0)
    model = TwiceUsed(load_spec("llama").build(architecture), first, second)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.model.layers["1"].extra_head.requires_grad_(second == "layers.1.extra_head")
    if is_sharded:
        manager = FSDP2Manager(job.fsdp_config, meshes)
        manager.parallelize(model, manager.plan(model))
    batches = split_batch(
        make_global_batch(0, 8, 16), meshes.dp_rank, meshes.topology.dp_size, 8 // meshes.topology.dp_size
    )
    for _ in range(2):
        model.zero_grad()
        PretrainTask().token_losses(model, batches[0]).sum().backward()
    is_tied = model.model.get_submodule(first).weight is model.model.get_submodule(second).weight
    return {fqn: whole_tensor(p.grad) for fqn, p in model.named_parameters() if p.requires_grad}, is_tied


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("layers.0.mlp.up_proj", "layers.1.mlp.up_proj"),
        ("embed_tokens", "layers.1.extra_head"),
        ("layers.1.input_layernorm", "norm"),
    ],
    ids=["two_blocks", "root_and_block", "block_and_root"],
)
def test_a_matrix_shared_across_units_is_owned_by_the_root_and_gets_both_gradients(first: str, second: str) -> None:
    ((expected, _),) = run_ranks(gradients_with_a_matrix_used_twice, 1, first, second, False)
    actual, is_tied = run_ranks(gradients_with_a_matrix_used_twice, 2, first, second, True)[0]
    assert is_tied
    assert actual.keys() == expected.keys()
    for fqn, gradient in expected.items():
        assert relative_error(actual[fqn], gradient) <= FP32_TENSOR, fqn


class Feed(nn.Module):
    """Enough of a model to be laid out by hand before FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def meshes_of(**sizes: int) -> Meshes:
    ones = {name: 1 for name in Topology.__dataclass_fields__ if name.endswith("_size")}
    return build_meshes(Topology(**{**ones, "world_size": dist.get_world_size(), **sizes}), CPU)


TP_LAYOUTS = {"up.weight": SourceLayout("tp", Shard(0)), "down.weight": SourceLayout("tp", Shard(1))}


def feed_under_tp_and_fsdp(layouts: dict[str, SourceLayout], replicate: tuple[str, ...]) -> dict[str, Tensor]:
    meshes = meshes_of(dp_size=2, tp_size=2, dp_shard_size=2)
    torch.manual_seed(0)
    model = Feed()
    parallelize_module(model, meshes.fsdp_non_moe_mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    job = load_job(None, [*MODEL, f"fsdp_config.replicate_params=[{', '.join(replicate)}]"])
    manager = FSDP2Manager(job.fsdp_config, meshes)
    manager.parallelize(model, manager.plan(model, layouts))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).chunk(2)[meshes.dp_rank]
    model(x).square().sum().backward()
    norm = global_gradient_norm(model.parameters(), CPU)
    return {"norm": norm, **{fqn: whole_tensor(parameter.grad) for fqn, parameter in model.named_parameters()}}


def reference_feed() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Feed()
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    gradients = {fqn: parameter.grad for fqn, parameter in model.named_parameters()}
    return {"norm": torch.stack([g.norm() for g in gradients.values()]).norm(), **gradients}


@pytest.mark.parametrize("replicate", [(), ("up.weight",)], ids=["sharded", "one_whole"])
def test_a_hand_made_tp_layout_flows_into_fsdp(replicate: tuple[str, ...]) -> None:
    expected = reference_feed()
    for outcome in run_ranks(feed_under_tp_and_fsdp, 4, TP_LAYOUTS, replicate):
        for name, value in expected.items():
            assert relative_error(outcome[name], value) <= FP32_TENSOR, name


def refusal(layouts: dict[str, SourceLayout]) -> str:
    try:
        feed_under_tp_and_fsdp(layouts, ())
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_a_layout_other_than_the_real_one_is_refused_by_name() -> None:
    said = run_ranks(refusal, 4, {"up.weight": SourceLayout("tp", Shard(1)), "down.weight": TP_LAYOUTS["down.weight"]})
    assert all("up.weight" in message and "down.weight" not in message for message in said)
    assert all("down.weight" in message for message in run_ranks(refusal, 4, {"up.weight": TP_LAYOUTS["up.weight"]}))


def refusal_of_two_axes() -> str:
    meshes = meshes_of()
    model = Feed()
    model.up.weight = nn.Parameter(
        distribute_tensor(model.up.weight.data, meshes.fsdp_non_moe_mesh["fsdp_shard", "tp"], [Shard(0), Shard(1)])
    )
    with pytest.raises(ConfigError) as caught:
        check_source_layouts(model, {"up.weight": TP_LAYOUTS["up.weight"]})
    return str(caught.value)


def test_a_parameter_laid_out_over_two_axes_is_refused_by_name() -> None:
    (message,) = run_ranks(refusal_of_two_axes, 1)
    assert "source layout of up.weight" in message
    assert "must be on one axis" in message
    assert "(fsdp_shard, tp)" in message


def wrap_in_vain(model: nn.Module, fqns: list[str]) -> None:
    with held_by_root(model, fqns):
        raise RuntimeError(f"not wrapped: {len(model.state_dict())} names")


def test_a_root_that_could_not_be_wrapped_keeps_no_name_of_what_it_would_borrow() -> None:
    model = nn.Sequential(Feed(), Feed())
    before = list(model.state_dict())
    with pytest.raises(RuntimeError, match="not wrapped: 6 names"):
        wrap_in_vain(model, ["0.up.weight", "1.up.weight"])
    with pytest.raises(AttributeError, match="unknown"):
        wrap_in_vain(model, ["0.up.weight", "1.unknown"])
    assert list(model.state_dict()) == before


class Experts(nn.Module):
    """One matrix per expert; every rank of ep applies its own and the results are summed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(3)))

    def forward(self, x_ETD: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return x_ETD @ weight


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((4,), 0.5))
        self.experts = Experts()

    def forward(self, x_ETD: Tensor) -> Tensor:
        return self.experts(x_ETD * self.gain)


def moe_under_ep_and_fsdp(edp_shard_size: int) -> tuple[dict[str, Tensor], str]:
    meshes = meshes_of(
        dp_size=4,
        ep_size=2,
        dp_shard_size=4,
        edp_size=2,
        edp_shard_size=edp_shard_size,
        edp_replicate_size=2 // edp_shard_size,
    )
    model = Moe()
    ep = meshes.fsdp_moe_mesh["ep"]
    model.experts.weight = nn.Parameter(distribute_tensor(model.experts.weight.data, ep, [Shard(0)]))
    manager = FSDP2Manager(load_job(None, list(MODEL)).fsdp_config, meshes)
    plan = manager.plan(model, {"experts.weight": SourceLayout("ep", Shard(0))})
    manager.parallelize(model, plan)
    # Tokens of expert e on data rank r; the ranks of one ep group hold the same tokens for different experts here.
    edp_rank, ep_rank = dist.get_rank() // 2, ep.get_local_rank()
    mine = expert_tokens()[edp_rank, 3 * ep_rank : 3 * ep_rank + 3]
    model(mine).square().sum().backward()
    return {fqn: whole_tensor(p.grad) for fqn, p in model.named_parameters()}, str(model.experts.weight.placements)


def expert_tokens() -> Tensor:
    return torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(("edp_shard_size", "dim"), [(2, 1), (1, 0)])
def test_a_hand_made_ep_layout_gets_its_own_domain_and_whole_sums(edp_shard_size: int, dim: int) -> None:
    model = Moe()
    for tokens in expert_tokens():
        model(tokens).square().sum().backward()
    for gradients, placements in run_ranks(moe_under_ep_and_fsdp, 4, edp_shard_size):
        # Three local experts do not split in two, so the plan splits inside them.
        assert f"Shard(dim={dim})" in placements.replace("S(", "Shard(dim="), placements
        for fqn, parameter in model.named_parameters():
            assert relative_error(gradients[fqn], parameter.grad) <= FP32_TENSOR, fqn
