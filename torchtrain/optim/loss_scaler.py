"""The dynamic loss scale that keeps small fp16 gradients from vanishing.

torch's GradScaler finds overflows with a look at every gradient and a collective of its own. Here the gradient norm is
already global, and finite exactly where all gradients are: every rank decides alike, without communication.
"""

from __future__ import annotations

from torchtrain.errors import NonFiniteError

_GROWTH_FACTOR = 2.0
_BACKOFF_FACTOR = 0.5
_MIN_SCALE = 1.0
_MAX_SCALE = 2.0**32


class LossScaler:
    """Multiply the loss by ``scale``, divide the gradients by it, skip the step where they overflowed.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; factors and interval as in torch's
        GradScaler.
    """

    def __init__(self, *, initial_scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale = initial_scale
        self._growth_interval = growth_interval
        self._finite_steps = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether an overflow would find no scale left to give up: the fault is not fp16's range then."""
        return self.scale <= _MIN_SCALE

    def update(self, is_finite: bool) -> None:
        """Halve the scale after an overflow; double it after ``growth_interval`` finite steps in a row.

        Args:
            is_finite: Whether the global gradient norm of this step was finite; the same on every rank.

        Raises:
            NonFiniteError: The gradients overflow with no scale left to give up.
        """
        if not is_finite:
            if self.is_exhausted:
                raise NonFiniteError("gradients are not finite even with the loss unscaled")
            self.scale = max(self.scale * _BACKOFF_FACTOR, _MIN_SCALE)
            self._finite_steps = 0
            return
        self._finite_steps += 1
        if self._finite_steps == self._growth_interval:
            self.scale = min(self.scale * _GROWTH_FACTOR, _MAX_SCALE)
            self._finite_steps = 0

    def state_dict(self) -> dict[str, float | int]:
        """Return what a resumed run needs, as JSON values."""
        return {"scale": self.scale, "finite_steps": self._finite_steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Continue from ``state_dict``'s values."""
        self.scale = float(state["scale"])
        self._finite_steps = int(state["finite_steps"])
