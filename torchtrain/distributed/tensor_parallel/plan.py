"""What tensor parallelism makes of every module and parameter: data, from a family's table and a meta model.

Pure: reads names and shapes. What is decided here is done in ``apply``, and FSDP is told of it by ``source_layouts``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchtrain.config.rules import nearest_multiples
from torchtrain.errors import ConfigError, Fault


class Style(Enum):
    """What becomes of a module. A family's table gives one to every module that owns parameters."""

    EMBEDDING = "embedding"
    """Rows of the vocabulary are split; what ranks look up is added, or with sequence parallel reduce-scattered."""
    WHOLE_INPUT = "whole_input"
    """Owns no parameters: its first input is brought whole to every rank once, for all columns inside."""
    COLUMN = "column"
    """Outputs are split, such as heads: the weight's rows and the bias."""
    ROW = "row"
    """Inputs are split: the weight's columns. Partial outputs are added, then the bias, once."""
    HEAD = "head"
    """The vocabulary is split; called as a module it gathers the logits."""
    TOKENWISE = "tokenwise"
    """Acts on each token of the residual stream, as a norm or a router: whole on every rank, with sequence parallel on
    this rank's tokens only."""
    HEAD_NORM = "head_norm"
    """Acts on this rank's heads with one weight for all heads, which every rank has whole."""
    ELSEWHERE = "elsewhere"
    """Laid out by another technique, which also sees to its gradients."""


@dataclass(frozen=True)
class ParallelModule:
    """One module and its style."""

    fqn: str
    style: Style


@dataclass(frozen=True)
class ParallelParameter:
    """One parameter on the tp axis."""

    fqn: str
    placement: Placement | None
    """None: a plain tensor, whole on every rank."""
    is_gradient_partial: bool
    """Each rank's gradient covers its own tokens or heads only; they are summed over tp once per step."""


@dataclass(frozen=True)
class TensorParallelPlan:
    """All that ``apply_tensor_parallel`` does, in module order."""

    tp_size: int
    is_sequence_parallel: bool
    modules: tuple[ParallelModule, ...]
    parameters: tuple[ParallelParameter, ...]
    """Every alias of a tied parameter is listed."""

    @property
    def placements(self) -> dict[str, Placement]:
        """Placement on the tp axis of each parameter that becomes a DTensor, aliases included."""
        return {parameter.fqn: parameter.placement for parameter in self.parameters if parameter.placement is not None}


_PLACEMENTS: dict[Style, dict[str, Placement]] = {
    Style.EMBEDDING: {"weight": Shard(0)},
    Style.COLUMN: {"weight": Shard(0), "bias": Shard(0)},
    Style.ROW: {"weight": Shard(1), "bias": Replicate()},
    Style.HEAD: {"weight": Shard(0), "bias": Shard(0)},
}


def plan_tensor_parallel(
    model: nn.Module, table: Mapping[str, Style], *, tp_size: int, is_sequence_parallel: bool
) -> TensorParallelPlan:
    """Resolve a family's table on a model, or on one pipeline stage of it.

    Args:
        model: On any device, meta included.
        table: Pattern of module fqns to style; the first that matches counts. A pattern may match nothing, as on a
            stage without an embedding.
        tp_size: Ranks on the tp axis.
        is_sequence_parallel: Whether the residual stream is split along the sequence.

    Raises:
        ConfigError: A parameter that no pattern covers, or one whose split dim ``tp_size`` does not divide, or a tied
            parameter with two layouts; all of them at once.
    """
    modules, parameters = [], []
    faults: list[Fault] = []
    for fqn, module in model.named_modules(remove_duplicate=False):
        style = next((style for pattern, style in table.items() if fnmatchcase(fqn, pattern)), None)
        own = dict(module.named_parameters(prefix=fqn, recurse=False, remove_duplicate=False))
        if style is None:
            faults += [_uncovered(name, table) for name in own]
            continue
        modules.append(ParallelModule(fqn, style))
        for name, parameter in own.items():
            placement = _PLACEMENTS.get(style, {}).get(name.rpartition(".")[2])
            is_partial = style is Style.HEAD_NORM or (style is Style.TOKENWISE and is_sequence_parallel)
            parameters.append(ParallelParameter(name, placement, is_partial))
            if style in (Style.COLUMN, Style.ROW):
                faults += _find_uneven(name, parameter.shape, placement, tp_size)
    faults += _find_torn_ties(model, {parameter.fqn: parameter for parameter in parameters})
    if faults:
        raise ConfigError(faults)
    return TensorParallelPlan(tp_size, is_sequence_parallel, tuple(modules), tuple(parameters))


def _uncovered(fqn: str, table: Mapping[str, Style]) -> Fault:
    rule = "must be covered by the family's tensor-parallel table"
    return Fault("accelerator.tp_size", fqn, rule, f"add its module to the patterns {', '.join(table)}")


def _find_uneven(fqn: str, shape: tuple[int, ...], placement: Placement | None, tp_size: int) -> Iterator[Fault]:
    # The vocabulary may be uneven, as its shards are never made from a local tensor of unknown global size.
    if isinstance(placement, Shard) and (size := shape[placement.dim]) % tp_size:
        rule = f"must divide dim {placement.dim} of {fqn}, {size}"
        yield Fault("accelerator.tp_size", tp_size, rule, f"make that size {nearest_multiples(size, of=tp_size)}")


def _find_torn_ties(model: nn.Module, planned: Mapping[str, ParallelParameter]) -> Iterator[Fault]:
    names: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    for aliases in names.values():
        layouts = {(planned[fqn].placement, planned[fqn].is_gradient_partial) for fqn in aliases if fqn in planned}
        if len(layouts) > 1:
            rule = "is one tied parameter and must have one tensor-parallel layout"
            yield Fault("accelerator.tp_size", ", ".join(aliases), rule, "give its modules styles with one layout")
