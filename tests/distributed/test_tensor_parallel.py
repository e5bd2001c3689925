"""Tensor parallelism on real ranks: weights, ties, what travels, checkpoints, and parts that families will need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.registry import load_spec, resolve_architecture
from tests.distributed.stored_run import StoredRun
from tests.parity.harness import MODEL, build_train_step, make_global_batch
from tests.parity.test_tensor_parallel import BIASED, GROUPED, LP, SHARD_2, SP, TP
from torchtrain.config.load import load_job
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.tensor_parallel.apply import apply_tensor_parallel
from torchtrain.distributed.tensor_parallel.partial_gradients import sum_partial_gradients
from torchtrain.distributed.tensor_parallel.plan import Style, plan_tensor_parallel
from torchtrain.distributed.topology import Topology
from torchtrain.nn.decoder import Decoder
from torchtrain.nn.rms_norm import RMSNorm
from torchtrain.optim.build import build_optimizer
from torchtrain.tasks.pretrain import PretrainTask
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.shares import split_batch, whole_tensor
from torchtrain.testing.tolerances import FP32_SCALAR, FP32_TENSOR, MODEL_OUTPUT
from torchtrain.trainer.forward_backward import build_forward_backward
from torchtrain.trainer.precision import ComputePrecision
from torchtrain.trainer.run import RankModel, Run, build_model


def build(*overrides: str) -> tuple[Run, RankModel]:
    job = load_job(None, [*MODEL, "training.micro_batch_size=2", *overrides])
    meshes = build_meshes(Topology.resolve(job, dist.get_world_size()), torch.device("cpu"))
    architecture = resolve_architecture("llama", "debug", job.model.overrides)
    run = Run(job, load_spec("llama"), architecture, meshes, is_main=False)
    return run, build_model(run)


def initial_weights(*overrides: str) -> tuple[dict[str, Tensor], bool]:
    _, rank_model = build(*overrides)
    model = rank_model.module
    assert isinstance(model, Decoder)
    assert model.lm_head is not None
    assert model.embed_tokens is not None
    is_tied = model.lm_head.weight is model.embed_tokens.weight
    return {fqn: whole_tensor(parameter.detach()) for fqn, parameter in model.named_parameters()}, is_tied


@pytest.mark.parametrize(
    ("model", "is_tied"), [((GROUPED,), False), (BIASED, True)], ids=["grouped_untied", "biased_tied"]
)
def test_ranks_start_from_the_weights_of_one_rank_and_ties_hold(model: tuple[str, ...], is_tied: bool) -> None:
    ((expected, _),) = run_ranks(initial_weights, 1, *model)
    for weights, is_tied_here in run_ranks(initial_weights, 4, *model, SHARD_2, TP, SP):
        assert is_tied_here == is_tied
        assert weights.keys() == expected.keys()
        for fqn, weight in expected.items():
            assert weights[fqn].equal(weight), fqn


class LargestCollective(TorchDispatchMode):
    """The most elements that any collective takes or gives on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # seen again as what it makes of it
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            for tensor in torch.utils._pytree.tree_leaves((args, kwargs, result)):
                if isinstance(tensor, Tensor):
                    self.numel = max(self.numel, tensor.numel())
        return result


NUM_TOKENS, HIDDEN, VOCABULARY = 2 * 16, 32, 101


def largest_collective(*overrides: str) -> int:
    run, rank_model = build(GROUPED, TP, *overrides)
    (batch, *_) = split_batch(make_global_batch(0, 8, 16), run.meshes.dp_rank, 1, 2)
    with LargestCollective() as mode:
        PretrainTask().token_losses(rank_model.module, batch).sum().backward()
    return mode.numel


@pytest.mark.parametrize("sequence", [(), (SP,)], ids=["whole_stream", "sequence_parallel"])
def test_loss_parallel_sends_no_logits(sequence: tuple[str, ...]) -> None:
    assert run_ranks(largest_collective, 2, LP, *sequence) == [NUM_TOKENS * HIDDEN] * 2
    # Without it the mode sees them, so it would have seen them with it.
    assert min(run_ranks(largest_collective, 2, *sequence)) >= NUM_TOKENS * VOCABULARY // 2


def losses_with_an_unknown_label() -> Tensor:
    _, rank_model = build(GROUPED, TP, SP, LP)
    batch = make_global_batch(0, 2, 16)
    batch.labels_BT[1, 3] = VOCABULARY
    return PretrainTask().token_losses(rank_model.module, batch).detach()


def test_label_outside_of_the_vocabulary_makes_its_own_loss_no_number_on_every_rank() -> None:
    for losses_BT in run_ranks(losses_with_an_unknown_label, 2):
        assert losses_BT.isnan().nonzero().tolist() == [[1, 3]]


class NumberOfCopies(TorchDispatchMode):
    """How often activations are cloned; the style of the embedding copies ids."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # seen again as what it makes of it
        self.num_copies += func is torch.ops.aten.clone.default and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def embedding_results(*overrides: str) -> tuple[int, bool, bool]:
    """Copies made, whether the result is a finished plain tensor, and whether it has a gradient."""
    _, rank_model = build(GROUPED, TP, *overrides)
    decoder = rank_model.module
    assert isinstance(decoder, Decoder)
    assert decoder.embed_tokens is not None
    with NumberOfCopies() as mode:
        output = decoder.embed_tokens(make_global_batch(0, 2, 16).input_ids_BT)
    return mode.num_copies, type(output) is Tensor, output.requires_grad


@pytest.mark.parametrize("sequence", [(), (SP,)], ids=["whole_stream", "sequence_parallel"])
def test_embedding_is_waited_for_and_not_copied(sequence: tuple[str, ...]) -> None:
    assert run_ranks(embedding_results, 2, *sequence) == [(0, True, True)] * 2


def optimizer_meshes(*overrides: str) -> list[list[int]]:
    run, rank_model = build(GROUPED, SHARD_2, TP, SP, "optimizer.fused=true", *overrides)
    optimizer = build_optimizer(rank_model.module, run.job.optimizer, device=run.device)
    step = build_train_step(run.job, rank_model, optimizer, run.meshes)
    whole = make_global_batch(0, 8, 16)
    step.run(1, split_batch(whole, run.meshes.dp_rank, 2, 2), whole.num_valid_tokens())
    covered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(covered) == len(set(covered)) == len(list(rank_model.module.parameters()))
    return [sorted({parameter.device_mesh.ndim for parameter in group["params"]}) for group in optimizer.param_groups]


def test_no_optimizer_group_mixes_meshes_and_fused_kernels_step_them() -> None:
    # Matrices decay and lie on (fsdp_shard, tp); norms do not decay and lie on fsdp_shard alone.
    assert run_ranks(optimizer_meshes, 4) == [[[2], [1]]] * 4


def next_token_logits(*overrides: str) -> Tensor:
    run, rank_model = build(GROUPED, *overrides)
    precision = ComputePrecision(run.job.fsdp_config.mix_precision, run.device, has_fsdp_domain=False)
    loop = build_forward_backward(
        run.job, rank_model, task=PretrainTask(), meshes=run.meshes, precision=precision, vocab_size=VOCABULARY
    )
    return loop.next_token_logits([5, 17, 3])


def test_a_prompt_of_odd_length_is_continued_as_on_one_rank() -> None:
    (expected,) = run_ranks(next_token_logits, 1)
    assert expected.shape == (VOCABULARY,)
    for logits in run_ranks(next_token_logits, 2, TP, SP, LP):
        assert relative_error(logits, expected) <= MODEL_OUTPUT


def train_and_save(folder: Path, *overrides: str) -> dict[str, Tensor]:
    run = StoredRun(*overrides, folder=folder)
    run.train(2)
    run.save()
    run.checkpointer.wait()
    return run.whole_tensors()


def load_and_train(folder: Path, *overrides: str) -> tuple[dict[str, Tensor], list[float]]:
    run = StoredRun(*overrides, folder=folder, resume="auto")
    run.resume()
    return run.whole_tensors(), run.train(1)


def test_a_checkpoint_travels_between_tensor_parallel_and_other_topologies(tmp_path: Path) -> None:
    overrides = (*BIASED, "training.micro_batch_size=2")
    saved = run_ranks(train_and_save, 4, tmp_path, *overrides, SHARD_2, TP, SP, LP)[0]
    topologies: dict[int, tuple[str, ...]] = {1: (), 2: (TP, SP), 4: (SHARD_2,)}
    scalars = []
    for world_size, topology in topologies.items():
        for loaded, after in run_ranks(load_and_train, world_size, tmp_path, *overrides, *topology):
            assert loaded.keys() == saved.keys()
            for name, tensor in saved.items():
                assert loaded[name].equal(tensor), name
            scalars.append(after)
    for after in scalars:
        for ours, theirs in zip(after, scalars[0], strict=True):
            assert relative_error(ours, theirs) <= FP32_SCALAR


class NormedHeads(nn.Module):
    """Projects to heads, normalises each by one weight, and projects back: what query and key norms do."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.q_proj, self.o_proj = nn.Linear(6, 12), nn.Linear(12, 6)
        self.q_norm = RMSNorm(3, 1e-5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads_BTNH = self.q_proj(x_BTD).unflatten(-1, (-1, 3))
        return self.o_proj(torch.flatten(self.q_norm(heads_BTNH), start_dim=-2))


HEADS_TABLE = {"": Style.WHOLE_INPUT, "q_proj": Style.COLUMN, "q_norm": Style.HEAD_NORM, "o_proj": Style.ROW}


def gradients_of_normed_heads(sums: bool) -> dict[str, Tensor]:
    model = NormedHeads()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    if mesh.size() > 1:
        plan = plan_tensor_parallel(model, HEADS_TABLE, tp_size=mesh.size(), is_sequence_parallel=False)
        apply_tensor_parallel(model, plan, mesh)
    x_BTD = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for _ in range(2):
        model(x_BTD).square().sum().backward()
    if sums:
        sum_partial_gradients(model, mesh)
    assert x_BTD.grad is not None
    gradients = {fqn: whole_tensor(p.grad) for fqn, p in model.named_parameters() if p.grad is not None}
    return {"input": x_BTD.grad, **gradients}


def test_a_norm_on_local_heads_learns_from_all_of_them() -> None:
    (expected,) = run_ranks(gradients_of_normed_heads, 1, True)
    for actual in run_ranks(gradients_of_normed_heads, 2, True):
        assert actual.keys() == expected.keys()
        for fqn, gradient in expected.items():
            assert relative_error(actual[fqn], gradient) <= FP32_TENSOR, fqn
    unsummed = run_ranks(gradients_of_normed_heads, 2, False)[0]
    wrong = [fqn for fqn, gradient in expected.items() if relative_error(unsummed[fqn], gradient) > FP32_TENSOR]
    assert wrong == ["q_norm.weight"]
