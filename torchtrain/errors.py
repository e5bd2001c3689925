"""Every error a user can cause, each carrying the exit code it deserves.

Not for programming errors: those stay ordinary exceptions with a traceback.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: where it stands, what stands there, the rule it breaks and the way out."""

    path: str
    """Dotted job path, file path or parameter fqn."""
    value: object
    """The offending value as the user wrote it; ``None`` prints as ``null``."""
    rule: str
    """What must hold, as a clause: "must be at least 1"."""
    fix: str
    """What to do about it, as an instruction: "use one of 1, 2, 4"."""

    def __str__(self) -> str:
        # As the job file writes it: null, true and false rather than Python's words.
        shown = json.dumps(self.value) if self.value is None or isinstance(self.value, bool) else repr(self.value)
        return f"{self.path} = {shown}: {self.rule}; {self.fix}"


class TorchtrainError(Exception):
    """A fault of the user's making; printed without a traceback. ``exit_code`` is what the process returns."""

    exit_code = 2


class FaultsError(TorchtrainError):
    """Several faults found in one pass, reported together."""

    heading = "the job is wrong"

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        lines = "\n".join(f"  {i}. {fault}" for i, fault in enumerate(self.faults, start=1))
        count = len(self.faults)
        super().__init__(f"{self.heading} ({count} fault{'s' if count != 1 else ''}):\n{lines}")


class ConfigError(FaultsError):
    """The job file, an override, or a name in it that the model does not have."""


class TopologyError(ConfigError):
    """Sizes that do not fit each other or the world size."""

    heading = "the parallel topology is wrong"


class DataError(TorchtrainError):
    """A source, a tokenizer or a cache that cannot be read as the job says."""


class CheckpointError(TorchtrainError):
    """A checkpoint that is torn, foreign, or does not fit the job."""


class WeightsError(FaultsError, CheckpointError):
    """Published weights that are damaged, or not those of the job's model."""

    heading = "the weights cannot be used"


class SaveError(CheckpointError):
    """A checkpoint could not be written: the disk's fault, not the job's."""

    exit_code = 1


class NonFiniteError(TorchtrainError):
    """Training stopped itself: a loss or gradient norm was not finite."""

    exit_code = 3


class LostPeerError(TorchtrainError):
    """Another rank is gone or silent: the fault is told by its log, not by this rank's."""

    exit_code = 1
