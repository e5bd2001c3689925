"""Save and resume a run, on this or another topology.

PyTorch's distributed checkpoint (DCP) writes and reshards the tensors; this file adds what it leaves open: a checkpoint
appears whole or not at all, a background save cannot fail unheard, and a foreign or damaged one is refused by name.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from torchtrain.checkpoint import layout
from torchtrain.checkpoint.safe_reader import SafeFileSystemReader, read_metadata
from torchtrain.checkpoint.training_state import (
    MAIN_PREFIX,
    find_mismatch,
    forget_optimizer_state,
    lacks_main_params,
    read_rng_state,
    restore_rng_state,
    restore_scalars,
    view_training_state,
    without_optimizer_state,
)
from torchtrain.config.observation import CheckpointConfig
from torchtrain.errors import CheckpointError, SaveError
from torchtrain.optim.main_params import MainParamOptimizer
from torchtrain.runtime.logging import get_logger

logger = get_logger(__name__)

_AUTO = "auto"
_RECORD_KEYS = {"step", "world_size", "optimizer_scalars", "state"}
_T = TypeVar("_T")


class Checkpointer:
    """Writes checkpoints into one folder and finds the one to resume from.

    Collective: the constructor and every method, the whole world in the same order.
    """

    def __init__(self, config: CheckpointConfig, folder: Path, *, timeout_s: float | None = None) -> None:
        """Open a group of its own.

        Args:
            config: Section ``checkpoint``.
            folder: Where this run's checkpoints lie.
            timeout_s: Seconds until a collective that a rank does not join fails; torch's own default otherwise.
        """
        self._config = config
        self._folder = folder
        # A group of its own: collectives of a background save never meet those of training.
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._pending: Future[None] | None = None
        self._last_step: int | None = None
        self._has_promised = False

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Save after ``step`` steps; a background save returns once everything is copied.

        Args:
            step: Steps done; names the checkpoint. The step that was saved last is not saved again.
            model: Its parameters, sharded or not.
            optimizer: Its state; hyperparameters are left to the job.
            state: Whatever else a resumed run needs, as JSON values; the same on every rank, rank 0's is written.

        Raises:
            SaveError: The disk refused, now or in the background save before this one. Older checkpoints are as they
                were.
            CheckpointError: The optimizer keeps what cannot be saved.
        """
        self.wait()
        if step == self._last_step:
            return
        started = time.perf_counter()
        view = view_training_state(model, optimizer, create_missing=False)
        record = {
            "step": step,
            "world_size": dist.get_world_size(),
            "has_optimizer_state": bool(optimizer.state),
            "optimizer_scalars": self._of_all_ranks(view.scalars),
            "state": state,
        }
        tensors = view.tensors | read_rng_state(_device_of(model))
        path = layout.checkpoint_path(self._folder, step)
        text = json.dumps(record, indent=1)
        if self._config.async_save:
            staged = cast(dict[str, Tensor], self._stager.stage(tensors))
            self._pending = _in_background(lambda: self._write(path, staged, text))
        else:
            self._write(path, tensors, text)
        self._last_step = step
        how = "in the background" if self._config.async_save else "done"
        logger.info(f"checkpoint {path} ({how}): training waited {time.perf_counter() - started:.3f} s")

    def wait(self) -> None:
        """Wait for the background save, if there is one.

        Raises:
            SaveError: It failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except BaseException:
                self._last_step = None
                raise

    def check_resume(self) -> bool:
        """Refuse a checkpoint that ``checkpoint.resume`` names and that is not whole, before a run is built for it.

        Returns:
            Whether ``resume`` will bring every weight, so that no other source of them need be read: from now on it
            does or raises.

        Raises:
            CheckpointError: It is missing or damaged.

        Collective: the whole world.
        """

        def look() -> bool:
            self._refuse_named()
            return find_resumable(self._config, self._folder) is not None

        self._has_promised = self._on_rank_0(look)
        return self._has_promised

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Load the checkpoint that ``checkpoint.resume`` names; ``auto`` is the newest that is usable, if any.

        Those that ``auto`` passes over are named in the log, with what is wrong with each.

        Returns:
            The ``state`` it was saved with; ``None`` to start anew, also when no checkpoint there was ever finished.

        Raises:
            CheckpointError: The one that is named is refused, or all the whole ones are.
        """
        self.wait()
        candidates = self._candidates()
        refusal: CheckpointError | None = None
        while (path := self._on_rank_0(lambda: next(candidates, None))) is not None:
            try:
                state = self.load(path, model, optimizer)
            except CheckpointError as error:
                if self._config.resume != _AUTO:
                    raise
                logger.warning(f"checkpoint skipped: {error}")
                refusal = refusal or error
                continue
            if self._config.resume == _AUTO:
                # The newest as it is: stopped before its first step, the run has nothing to save again.
                self._last_step = layout.step_of(path)
            elif path.parent.resolve() != self._folder.resolve():
                self._begin_run()
            return state
        if refusal is not None:
            # Starting anew on weights that a failed load may have touched, or beside a foreign run, helps nobody.
            raise refusal
        if self._has_promised:
            raise CheckpointError(f"{self._folder}: the checkpoint that this run was to go on from is gone")
        self._begin_run()
        return None

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Load weights, optimizer state and generators in place, whatever topology they were saved on.

        Args:
            path: A checkpoint.
            model: Receives the weights; its gradients are dropped.
            optimizer: Receives the state.

        Returns:
            The ``state`` it was saved with.

        Raises:
            CheckpointError: The checkpoint is damaged, or is one of another model or optimizer. Unless it is the data
                itself that cannot be read, nothing has been changed by then.
        """
        self.wait()
        optimizer.zero_grad(set_to_none=True)
        view = view_training_state(model, optimizer)
        metadata, record = self._inspect(path, view.tensors)
        device = _device_of(model)
        rng_state = read_rng_state(device)
        has_rng_state = (
            record["world_size"] == dist.get_world_size() and rng_state.keys() <= metadata.state_dict_metadata.keys()
        )
        has_optimizer_state = record.get("has_optimizer_state", True)
        tensors = view.tensors if has_optimizer_state else without_optimizer_state(view.tensors)
        tensors = tensors | rng_state if has_rng_state else tensors
        starts_mains_anew = lacks_main_params(metadata, tensors)
        if starts_mains_anew:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(MAIN_PREFIX)}
        try:
            dcp.load(tensors, storage_reader=SafeFileSystemReader(path), process_group=self._group)
        except dcp.CheckpointException as error:
            raise CheckpointError(f"{path} cannot be read: {_describe_failures(error)}") from error
        restore_scalars(model, optimizer, record["optimizer_scalars"])
        if not has_optimizer_state and optimizer.state:
            forget_optimizer_state(optimizer)
            logger.warning(f"{path} holds no optimizer state, as one saved before the first step: it starts anew")
        if starts_mains_anew and isinstance(optimizer, MainParamOptimizer):
            optimizer.restart_from_weights()
            logger.warning(f"{path} holds no fp32 main parameters: they start from its low-precision weights")
        if has_rng_state:
            restore_rng_state(rng_state, device)
        else:
            there, here = record["world_size"], dist.get_world_size()
            logger.info(
                f"random generators start anew: {path.name} is of {there} rank(s), this run has {here} on {device.type}"
            )
        return record["state"]

    def _begin_run(self) -> None:
        earlier = self._on_rank_0(lambda: layout.begin_run(self._folder))
        if earlier:
            logger.warning(
                f"{self._folder} holds {len(earlier)} checkpoint(s) of an earlier run, the newest {earlier[0].name}: "
                "auto passes over them from now on, keep_last does not count them, and one whose step is saved again "
                "is replaced. To go on with one of them, name it in checkpoint.resume"
            )

    def _write(self, path: Path, tensors: dict[str, Tensor], record: str) -> None:
        partial = layout.partial_path(path)

        def prepare() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            layout.clear_leftovers(self._folder)

        def finish() -> None:
            layout.write_durably(partial / layout.STATE_FILE, record)
            layout.seal(partial)
            layout.publish(path)
            layout.prune(self._folder, self._config.keep_last)

        self._on_rank_0(prepare, failure=SaveError)
        try:
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial), process_group=self._group)
        except dcp.CheckpointException as error:
            raise SaveError(f"{path} was not saved: {_describe_failures(error)}") from error
        self._on_rank_0(finish, failure=SaveError)

    def _candidates(self) -> Iterator[Path]:
        """Yield whole checkpoints, the newest first, and tell of those passed over. Rank 0 only."""
        layout.give_back_replaced(self._folder)
        resume = self._config.resume
        if resume is None:
            return
        if resume != _AUTO:
            self._refuse_named()
            yield Path(resume)
            return
        for path in layout.list_own_checkpoints(self._folder):
            damage = _find_damage(path)
            if damage is None:
                yield path
            else:
                logger.warning(f"checkpoint skipped: {damage}")

    def _refuse_named(self) -> None:
        layout.give_back_replaced(self._folder)
        refuse_damaged(self._config.resume)

    def _inspect(self, path: Path, tensors: dict[str, Tensor]) -> tuple[Metadata, dict[str, Any]]:
        """Read the small files of a checkpoint and compare it with the live tensors, on every rank with one outcome."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, list(tensors), group=self._group)
        metadata, record = Metadata({}), {}
        refusal: str | None = None
        try:
            metadata = read_metadata(path)
            record = json.loads((path / layout.STATE_FILE).read_text(encoding="utf-8"))
            if not (isinstance(record, dict) and record.keys() >= _RECORD_KEYS):
                raise ValueError(f"it must have the keys {', '.join(sorted(_RECORD_KEYS))}")
            if not record.get("has_optimizer_state", True):
                tensors = without_optimizer_state(tensors)
            mismatch = find_mismatch(metadata, tensors, {name for names in gathered for name in names})
            if mismatch is not None:
                refusal = f"{path} is of another model or optimizer: it {mismatch}"
        except CheckpointError as error:
            refusal = str(error)
        except (OSError, ValueError) as error:
            refusal = f"{path / layout.STATE_FILE} cannot be read: {error}"
        dist.all_gather_object(gathered, refusal, group=self._group)
        refusals = [text for text in gathered if text is not None]
        if refusals:
            raise CheckpointError(refusals[0])
        return metadata, record

    def _of_all_ranks(self, by_fqn: dict[str, _T]) -> dict[str, _T]:
        """Collect on rank 0 what each rank has of its own parameters: pipeline stages have different ones."""
        everyone: list[dict[str, _T]] = [by_fqn for _ in range(dist.get_world_size())]
        dist.gather_object(by_fqn, everyone if dist.get_rank() == 0 else None, group=self._group)
        return {fqn: value for one in everyone for fqn, value in one.items()}

    def _on_rank_0(self, action: Callable[[], _T], *, failure: type[CheckpointError] = CheckpointError) -> _T:
        """Let rank 0 act on the disk, and give every rank its result or its error."""
        outcome: list[Any] = [None, None]
        cause: Exception | None = None
        if dist.get_rank() == 0:
            try:
                outcome[0] = action()
            except Exception as error:  # Whatever it is, the other ranks wait to hear of it.
                cause = error
                outcome[1] = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if cause is not None and not isinstance(cause, (OSError, CheckpointError)):
            raise cause
        if outcome[1] is not None:
            raise failure(outcome[1]) from cause
        return outcome[0]


def refuse_damaged(resume: str | None) -> None:
    """Refuse a checkpoint that ``checkpoint.resume`` names and that is not whole. Needs no process group.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    if resume in (None, _AUTO):
        return
    path = Path(resume)
    damage = _find_damage(path)
    if damage is not None:
        raise CheckpointError(f"{damage}; {_suggest_another(path)}")


def find_resumable(config: CheckpointConfig, folder: Path) -> Path | None:
    """Return the checkpoint that a run would load first; ``None`` where it would start anew. Only looks.

    Args:
        config: Section ``checkpoint``.
        folder: Where the run's checkpoints lie.
    """
    if config.resume is None:
        return None
    if config.resume != _AUTO:
        return Path(config.resume)
    return next((path for path in layout.list_own_checkpoints(folder) if _find_damage(path) is None), None)


def _in_background(action: Callable[[], None]) -> Future[None]:
    """Start a thread that the interpreter does not wait for when it leaves: a failed rank must be able to."""
    future: Future[None] = Future()

    def work() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="checkpoint", daemon=True).start()
    return future


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters())
    # Offloaded parameters lie on the CPU; their mesh says where the model computes.
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def _find_damage(path: Path) -> str | None:
    """Say what is wrong with the files of a checkpoint, its metadata read included."""
    damage = layout.find_damage(path)
    if damage is not None:
        return f"{path}: {damage}"
    try:
        read_metadata(path)
    except CheckpointError as error:
        return str(error)
    return None


def _suggest_another(path: Path) -> str:
    for folder in (path.parent, path, path / "checkpoints"):
        for other in layout.list_checkpoints(folder):
            if _find_damage(other) is None:
                return f"the newest whole one is {other}"
    return "there is no whole one beside it"


def _describe_failures(error: dcp.CheckpointException) -> str:
    return "; ".join(
        f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(error.failures.items())
    )
