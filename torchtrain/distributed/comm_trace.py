"""Records every collective of a training step, and what each FSDP unit computes in between: ``debug.comm_trace``.

A dispatch mode sees the collectives, wherever they come from, and the profiler labels with which torch's FSDP says
which unit it gathers or reduces (``FSDP::all_gather (layers.0)``), the pipeline's labels with which its stages say
which micro-batch they work on, and the labels of expert parallelism; so nothing of FSDP is patched and the model gets
no hooks but two on its root, or on the root of each stage. Nothing of this exists where the trace is off.

A record is a mapping, ready for JSON, of one of four kinds:

- ``collective``: ``step, rank, sequence`` (issue order on this rank), ``micro_batch`` (null outside a forward or
  backward), ``kind, axis, group_size, unit`` (fqn, ``root``, or null where no unit asked for it), ``phase, bytes,
  sent_bytes`` (see ``collective_ops``), ``dtype, started_s, ended_s``. One that takes tokens to experts or home has
  two more: ``exchange``, its name in the layer, and ``waited_s``, when the rank had nothing left to do but wait for it
  (null where it never did); its axis is ``ep``, its unit the one that was running.
- ``compute``: ``unit`` (null for the optimizer), ``phase, micro_batch, started_s, ended_s``: time that passed while the
  unit was running and none of FSDP's own hooks was.
- ``experts``: the same keys: grouped products of experts, as many as ran with no exchange begun or waited for between
  them. They lie inside the ``compute`` of their unit, where it has one.
- ``summary``: the last one of a step and rank: ``wall_s`` and ``totals``, counts and bytes per kind, axis, unit, phase.

Phases: ``agree`` before the first forward of a step (token counts), ``forward``, ``backward``, ``optimizer`` for
everything after them (gradient norm, loss, update). A pipeline's forwards and backwards alternate; what passes between
stages belongs to neither, as both directions travel in one batch: ``pipeline``. Two stages of one rank both have a
unit ``root``. Evaluations and checkpoints lie outside steps and are not recorded.

Times are seconds since this rank began the step, on the host's clock. A collective ends when its work is first found
done, which is looked for at every operator; null where it went on beyond the step.
Operators inside a compiled graph are not seen; FSDP's collectives always are, because its hooks are not compiled.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from torchtrain.distributed.collective_ops import OPERATORS, find_work, read_collective
from torchtrain.distributed.comm_volume import domain_axis
from torchtrain.distributed.meshes import Meshes

Record = dict[str, Any]

ENTER, EXIT = "profiler::_record_function_enter_new", "profiler::_record_function_exit._RecordFunction"
WAIT = "_c10d_functional::wait_tensor"
_FSDP_LABEL = re.compile(r"FSDP::(?P<hook>\w+)(?: for [^(\[]*)?(?: \((?P<unit>[^)]*)\))?(?: \[pg=\d+\])?$")
_PIPELINE_LABEL = re.compile(r"pipeline::(?P<what>forward|backward|step)(?: (?P<micro_batch>\d+))?$")
_EXCHANGE_LABEL = re.compile(r"expert_exchange::(?P<part>start|finish|whole) (?P<name>.*)$")
_EXPERT_PRODUCTS = ("torchtrain::grouped_mm", "torchtrain::grouped_outer")
_UNIT_HOOKS = ("all_gather", "all_gather_copy_out", "pre_forward", "post_forward", "pre_backward")
_UNIT_HOOKS += ("post_backward_accumulate", "post_backward_reshard", "post_backward_reduce")
_OPTIMIZER_LABEL = "Optimizer.step#"
_SHORTEST_SPAN_S = 20e-6
"""Shorter than this is the way from one hook to the next."""


class TraceLog(Protocol):
    """Where records go."""

    def write(self, records: Sequence[Record]) -> None:
        """Take what all ranks recorded in one step; called on rank 0."""

    def write_failed_step(self, rank: int, records: Sequence[Record]) -> None:
        """Take what one rank had recorded when its step failed; called on that rank."""


class CommTrace:
    """Records the steps of one run."""

    def __init__(self, chunks: Sequence[nn.Module], meshes: Meshes, log: TraceLog) -> None:
        """Hook into what is called, the model or this rank's stages of it."""
        self._axes = AxisNames(meshes)
        self._log = log
        self._recorder: _Recorder | None = None
        for chunk in chunks:
            chunk.register_forward_pre_hook(self._enter_forward, prepend=True)
            chunk.register_forward_hook(self._leave_forward, always_call=True)

    @contextmanager
    def step(self, step: int) -> Generator[None]:
        """Record what happens inside and hand it to the log.

        Where the body raises, each rank hands over its own records: the others may not be there to gather them.

        Collective: the whole world.
        """
        rank = dist.get_rank()
        self._recorder = recorder = _Recorder(step, rank, self._axes)
        try:
            with recorder:
                yield
        except BaseException:
            self._log.write_failed_step(rank, recorder.finish())
            raise
        finally:
            self._recorder = None
        by_rank: list[list[Record]] | None = [[] for _ in range(dist.get_world_size())] if rank == 0 else None
        dist.gather_object(recorder.finish(), by_rank)
        if by_rank is not None:
            self._log.write([record for records in by_rank for record in records])

    def _enter_forward(self, *_: Any) -> None:
        if self._recorder:
            self._recorder.enter_forward()

    def _leave_forward(self, *_: Any) -> None:
        if self._recorder:
            self._recorder.leave_forward()


class AxisNames:
    """Names the ranks of a process group after the mesh axis that they are.

    By ranks, not by group: torch hands one group to several axes with the same ranks, and several groups to one axis.
    """

    def __init__(self, meshes: Meshes) -> None:
        self._plain = _axes_of(meshes.device_mesh)
        self._sharding = _axes_of(meshes.fsdp_non_moe_mesh)
        if meshes.fsdp_moe_mesh is not None:
            self._sharding |= {
                ranks: name for ranks, name in _axes_of(meshes.fsdp_moe_mesh).items() if ranks not in self._sharding
            }
        if meshes.pp_group is not None:
            self._plain[_ranks_of(meshes.pp_group)] = "pp"
        if 1 < meshes.loss_group.size() < dist.get_world_size():
            self._plain.setdefault(_ranks_of(meshes.loss_group), "loss_domain")
        self._ranks: dict[str, tuple[int, ...]] = {}

    def name(self, group: dist.ProcessGroup, *, is_unit: bool) -> str:
        """Name of the group's axis.

        Args:
            group: Any group of this run.
            is_unit: Whether an FSDP unit asks: the same ranks are ``fsdp_shard`` to it and ``dp`` to a loss.

        Returns:
            The axis; ``world``, ``self`` or ``other`` where the group is none.
        """
        if group.group_name not in self._ranks:
            self._ranks[group.group_name] = _ranks_of(group)
        ranks = self._ranks[group.group_name]
        first, second = (self._sharding, self._plain) if is_unit else (self._plain, self._sharding)
        fallback = {1: "self", dist.get_world_size(): "world"}.get(len(ranks), "other")
        return first.get(ranks) or second.get(ranks) or fallback


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _axes_of(mesh: DeviceMesh) -> dict[tuple[int, ...], str]:
    """Ranks to name for the axes of a three-axis mesh that join several ranks, and for its first two together."""
    names, here = mesh.mesh_dim_names or (), mesh.get_coordinate()
    assert here is not None, "this rank is not in its own mesh"
    axes: dict[tuple[int, ...], str] = {}
    plane = mesh.mesh[:, :, here[2]]
    first, second = ((name, mesh.size(axis)) for axis, name in enumerate(names[:2]))
    if plane.numel() > 1:
        axes[tuple(sorted(plane.flatten().tolist()))] = domain_axis((first, second))
    for axis, name in enumerate(names):
        if mesh.size(axis) > 1:
            at = tuple(slice(None) if other == axis else here[other] for other in range(mesh.ndim))
            axes[tuple(sorted(mesh.mesh[at].tolist()))] = name
    return axes


class _Recorder(TorchDispatchMode):
    """What one rank does in one step."""

    # Not so that they be recorded: without this torch refuses to run one under a mode.
    supports_higher_order_operators = True

    def __init__(self, step: int, rank: int, axes: AxisNames) -> None:
        super().__init__()
        self._began = time.perf_counter()
        self._identity = {"step": step, "rank": rank}
        self._axes = axes
        self._collectives: list[Record] = []
        self._spans = _Spans()
        self._labels: list[str] = []
        self._pending: list[tuple[Record, dist.Work, bool]] = []
        self._unwaited: dict[int, Record] = {}
        self._travelling: dict[str, list[Record]] = defaultdict(list)
        self._experts: list[Record] = []
        self._is_among_products = False
        self._autograd = ModuleTracker()
        self._forward_depth = 0
        self._micro_batch = -1

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile what it would compile without the trace."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A DTensor first becomes the local operators and collectives that it stands for; those come back here.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self._pending:
            self._note_ends()
        if func.namespace == "aten":
            return func(*args, **(kwargs or {}))
        name = func.name()
        if operator := OPERATORS.get(name):
            return self._record(operator, func, args, kwargs or {})
        if name == ENTER:
            self._enter_label(args[0])
        started = self._now()
        result = func(*args, **(kwargs or {}))
        if name in _EXPERT_PRODUCTS:
            self._note_product(started)
        elif name == EXIT:
            self._leave_label()
        elif name == WAIT and (record := self._unwaited.pop(args[0].untyped_storage().data_ptr(), None)):
            record["ended_s"] = self._now()
        return result

    def enter_forward(self) -> None:
        """A forward pass of the model begins."""
        if not self._autograd.is_bw:
            self._micro_batch += self._forward_depth == 0
            self._forward_depth += 1

    def leave_forward(self) -> None:
        """It is over."""
        self._forward_depth = max(0, self._forward_depth - (not self._autograd.is_bw))

    def finish(self) -> list[Record]:
        """All records of the step, the summary last."""
        now = self._now()
        self._note_ends()
        spans = [{"record": "compute", **self._identity, **span} for span in self._spans.done]
        experts = [{"record": "experts", **self._identity, **span} for span in self._experts]
        return [*self._collectives, *spans, *experts, self._summary(now)]

    def _record(self, operator: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        collective = read_collective(operator, args)
        phase, unit, exchange = self._phase, self._unit, self._exchange
        axis = self._axes.name(collective.group, is_unit=unit is not None) if exchange is None else "ep"
        record: Record = {
            "record": "collective",
            **self._identity,
            "sequence": len(self._collectives),
            "micro_batch": self._current_micro_batch if phase in ("forward", "backward") else None,
            "kind": collective.kind,
            "axis": axis,
            "group_size": collective.group.size(),
            "unit": unit if exchange is None else self._spans.running_unit,
            "phase": phase,
            "bytes": collective.bytes,
            "sent_bytes": collective.sent_bytes,
            "dtype": collective.dtype,
            "started_s": self._now(),
            "ended_s": None,
        }
        self._collectives.append(record)
        if exchange is not None:
            is_whole = exchange["part"] == "whole"
            record |= {"exchange": exchange["name"], "waited_s": record["started_s"] if is_whole else None}
            self._travelling[exchange["name"]].append(record)
        result = func(*args, **kwargs)
        self._watch(record, result, is_blocking=collective.is_blocking)
        return result

    def _watch(self, record: Record, result: Any, *, is_blocking: bool) -> None:
        """Remember what will tell the end of a collective: its work, or the wait for its result."""
        work = find_work(result)
        if work is not None:
            self._pending.append((record, work, is_blocking))
        elif isinstance(result, torch.Tensor):
            self._unwaited[result.untyped_storage().data_ptr()] = record

    def _note_ends(self) -> None:
        """Ask who is done. Not every work of gloo knows; but where the caller waited, being here means the end."""
        for record, work, is_blocking in self._pending:
            if record["ended_s"] is None and (is_blocking or work.is_completed()):
                record["ended_s"] = self._now()
        self._pending = [entry for entry in self._pending if entry[0]["ended_s"] is None]

    def _note_product(self, started: float) -> None:
        """A product of experts is done; with those right before it, it is one span."""
        ended, unit, phase = self._now(), self._spans.running_unit, self._phase
        if self._is_among_products and (self._experts[-1]["unit"], self._experts[-1]["phase"]) == (unit, phase):
            self._experts[-1]["ended_s"] = ended
            return
        self._is_among_products = True
        place = {"unit": unit, "phase": phase, "micro_batch": self._current_micro_batch}
        self._experts.append({**place, "started_s": started, "ended_s": ended})

    @property
    def _phase(self) -> str:
        if self._autograd.is_bw:
            return "backward"
        if self._forward_depth:
            return "forward"
        if (label := self._pipeline_label) is not None:
            if label["what"] != "step":
                return label["what"]
            # Some schedules gather a stage's parameters ahead of its first forward.
            return "pipeline" if self._unit is None else "forward"
        return "agree" if self._micro_batch < 0 else "optimizer"

    @property
    def _pipeline_label(self) -> re.Match[str] | None:
        """What the innermost label of a pipeline says."""
        matches = (_PIPELINE_LABEL.match(label) for label in reversed(self._labels))
        return next((match for match in matches if match), None)

    @property
    def _current_micro_batch(self) -> int | None:
        """Counted from 0; None where a pipeline gathers or reduces for all of a step."""
        if (label := self._pipeline_label) is None:
            return self._micro_batch
        return None if label["micro_batch"] is None else int(label["micro_batch"])

    @property
    def _unit(self) -> str | None:
        for label in reversed(self._labels):
            match = _FSDP_LABEL.match(label)
            if match and match["hook"] in _UNIT_HOOKS:
                return match["unit"] or "root"
        return None

    @property
    def _exchange(self) -> re.Match[str] | None:
        """The exchange of tokens that is being begun, or made at once."""
        matches = (_EXCHANGE_LABEL.match(label) for label in reversed(self._labels))
        return next((match for match in matches if match), None)

    def _enter_label(self, label: str) -> None:
        now = self._now()
        self._labels.append(label)
        if match := _EXCHANGE_LABEL.match(label):
            self._is_among_products = False
            for record in self._travelling[match["name"]] if match["part"] == "finish" else ():
                record["waited_s"] = now
        elif match := _FSDP_LABEL.match(label):
            self._spans.pause(now)
            unit = match["unit"] or "root"
            if match["hook"] == "post_forward":
                self._spans.close(unit, "forward")
            elif match["hook"] == "post_backward_accumulate":
                self._spans.close(unit, "backward")
        elif label.startswith(_OPTIMIZER_LABEL):
            self._spans.open(None, "optimizer", None)
            self._spans.resume(now)

    def _leave_label(self) -> None:
        if not self._labels:
            return
        label = self._labels.pop()
        now = self._now()
        if (match := _EXCHANGE_LABEL.match(label)) and match["part"] != "start":
            for record in self._travelling.pop(match["name"], ()):
                record["ended_s"] = record["ended_s"] or now
        if label.startswith(_OPTIMIZER_LABEL):
            self._spans.pause(now)
            self._spans.close(None, "optimizer")
        match = _FSDP_LABEL.match(label)
        if match and match["hook"] in ("pre_forward", "pre_backward"):
            self._spans.open(match["unit"] or "root", match["hook"].removeprefix("pre_"), self._current_micro_batch)
        if match and not any(_FSDP_LABEL.match(other) for other in self._labels):
            self._spans.resume(now)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _summary(self, wall_s: float) -> Record:
        totals: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0, 0])
        for record in self._collectives:
            total = totals[tuple(record[key] for key in ("kind", "axis", "unit", "phase"))]
            total[0] += 1
            total[1] += record["bytes"]
            total[2] += record["sent_bytes"]
        names = ("kind", "axis", "unit", "phase", "count", "bytes", "sent_bytes")
        rows = [dict(zip(names, (*key, *total), strict=True)) for key, total in totals.items()]
        return {"record": "summary", **self._identity, "wall_s": wall_s, "totals": rows}


class _Spans:
    """Who computes when: of the passes that are open, the innermost runs, and only while no hook of FSDP does."""

    def __init__(self) -> None:
        self.done: list[Record] = []
        self._open: list[tuple[str | None, str, int | None]] = []
        self._since: float | None = None

    @property
    def running_unit(self) -> str | None:
        """Unit of the innermost pass; None outside of all."""
        return self._open[-1][0] if self._open else None

    def open(self, unit: str | None, phase: str, micro_batch: int | None) -> None:
        """A unit's pass begins; groups of one unit say so one after another."""
        if not any(entry[:2] == (unit, phase) for entry in self._open):
            self._open.append((unit, phase, micro_batch))

    def close(self, unit: str | None, phase: str) -> None:
        """It ends."""
        self._open = [entry for entry in self._open if entry[:2] != (unit, phase)]

    def resume(self, now: float) -> None:
        """The innermost open pass runs from now on."""
        if self._open and self._since is None:
            self._since = now

    def pause(self, now: float) -> None:
        """Nothing runs from now on."""
        if self._open and self._since is not None and now - self._since >= _SHORTEST_SPAN_S:
            unit, phase, micro_batch = self._open[-1]
            span = {"unit": unit, "phase": phase, "micro_batch": micro_batch, "started_s": self._since, "ended_s": now}
            self.done.append(span)
        self._since = None
