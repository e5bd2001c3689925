"""Cuts a decoder into the stages of one rank.

A stage shares its modules with the model it was cut from, and from the model everything of other ranks is removed. So
the model names exactly this rank's parameters, under the names they have on one rank: initialisation, optimizer, norm
and checkpoint need not know that there are stages.
"""

from __future__ import annotations

import copy

from torch import nn

from torchtrain.distributed.pipeline_parallel.stage_plan import PipelinePlan, PipelineStagePlan, StageCosts
from torchtrain.nn.decoder import Decoder
from torchtrain.nn.moe import MoE


def split_into_stages(model: Decoder, plan: PipelinePlan, pp_rank: int) -> tuple[Decoder, ...]:
    """Cut out the stages of one rank and remove the rest from ``model``, in place.

    Args:
        model: The whole decoder, not wrapped by FSDP and without hooks. Layers keep their global names.
        plan: All stages.
        pp_rank: Whose stages remain.

    Returns:
        The stages, in the order of the forward pass; ``model`` itself where there is one.
    """
    mine = plan.stages_of(pp_rank)
    stages = tuple(_cut(model, stage) for stage in mine) if len(mine) > 1 else (model,)
    _keep(model, mine)
    return stages


def measure_costs(model: Decoder) -> StageCosts:
    """Read the costs of embedding and head off a whole model, on any device."""
    head, embedding = model.lm_head, model.embed_tokens
    assert head is not None, "costs are those of a whole model"
    assert embedding is not None, "costs are those of a whole model"
    return StageCosts.of(
        num_matmul_parameters=head.weight.numel() + sum(_visited_parameters(block) for block in model.blocks()),
        num_layers=len(model.layers),
        vocab_size=embedding.weight.shape[0],
        hidden_size=embedding.weight.shape[1],
    )


def _visited_parameters(block: nn.Module) -> int:
    """Matmul parameters that one token is multiplied with: of routed experts, those that it visits."""
    total = 0
    for module in block.modules():
        if isinstance(module, nn.Linear):
            total += module.weight.numel()
        elif isinstance(module, MoE):
            config = module.router.config
            experts = sum(parameter.numel() for parameter in module.experts.parameters())
            total += experts * config.num_experts_per_tok // config.num_experts
    return total


def _cut(model: Decoder, stage: PipelineStagePlan) -> Decoder:
    chunk = copy.copy(model)
    # A shallow copy shares the dicts in which a module keeps its children.
    vars(chunk).update({name: copy.copy(value) for name, value in vars(model).items() if isinstance(value, dict)})
    _keep(chunk, (stage,))
    return chunk


def _keep(model: Decoder, stages: tuple[PipelineStagePlan, ...]) -> None:
    kept = {str(index) for stage in stages for index in stage.layers}
    # A new container, as another chunk may share the old one.
    model.layers = nn.ModuleDict({name: layer for name, layer in model.layers.items() if name in kept})
    if not any(stage.is_first for stage in stages):
        model.embed_tokens = None
    if not any(stage.is_last for stage in stages):
        model.norm = model.lm_head = None
