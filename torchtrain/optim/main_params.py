"""fp32 main parameters: an optimizer that steps fp32 copies of low-precision parameters and writes them back.

In bf16 an update below 2**-9 of a weight is lost, however often it comes; in the fp32 copy it adds up. Moments are
fp32 with it, as the inner optimizer knows nothing but the copies. Goes with fp32 main gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ParamGroups = list[dict[str, Any]]
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class MainParamOptimizer(torch.optim.Optimizer):
    """Any optimizer, stepped on fp32 main parameters.

    From outside it is an optimizer of the model's own parameters: ``param_groups`` holds those and is where
    hyperparameters are set, ``zero_grad`` drops their gradients, ``state`` names the inner optimizer's state by them.
    A parameter whose storage is not of low precision is its own main parameter and is not copied.

    Weights that ``load_state_dict`` of the model brings later are taken over where ``watch_loads`` was called; whoever
    writes into parameters in another way calls ``take_over`` or ``restart_from_weights`` afterwards.

    Args:
        groups: Parameter groups of the model, each with a list of ``params``.
        build_inner: Parameter groups to the optimizer that steps them.
    """

    def __init__(self, groups: ParamGroups, build_inner: Callable[[ParamGroups], torch.optim.Optimizer]) -> None:
        self._mains = {parameter: _main_of(parameter) for group in groups for parameter in group["params"]}
        inner_groups = [{**group, "params": [self._mains[p] for p in group["params"]]} for group in groups]
        self.inner = build_inner(inner_groups)
        outer = [
            {**inner, "params": list(group["params"])}
            for inner, group in zip(self.inner.param_groups, groups, strict=True)
        ]
        super().__init__(outer, self.inner.defaults)

    @property
    def main_params(self) -> dict[nn.Parameter, nn.Parameter]:
        """Parameter of the model to its fp32 copy; those that are their own are not listed."""
        return {parameter: main for parameter, main in self._mains.items() if main is not parameter}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyrefly: ignore[bad-override]
        """Step the main parameters on the model's gradients, then write them back.

        Numerics: the copy back rounds to nearest. No host sync of its own.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, main in self.main_params.items():
            # A main gradient is fp32 already and is not copied.
            main.grad = None if parameter.grad is None else parameter.grad.to(main.dtype)
        self._step_inner()
        self._write_back()
        return loss

    @torch.no_grad()
    def restart_from_weights(self) -> None:
        """Start the main parameters anew from the low-precision ones."""
        for parameter, main in self.main_params.items():
            main.copy_(parameter)

    @torch.no_grad()
    def take_over(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let main parameters follow weights that someone else has written; those left alone keep their precision."""
        for parameter in parameters:
            main = self._mains.get(parameter, parameter)
            if main is not parameter:
                weight, copy = _local(parameter), _local(main)
                copy.copy_(torch.where(copy.to(weight.dtype) == weight, copy, weight.to(copy.dtype)))

    def watch_loads(self, model: nn.Module) -> None:
        """Take over whatever ``load_state_dict`` brings to ``model`` or to a part of it from now on.

        With ``assign=True`` it puts parameters in place that this optimizer does not know: it then raises RuntimeError.
        """
        for module in model.modules():
            _watch(module, self)

    @torch.no_grad()
    def create_state(self) -> None:
        """Let the inner optimizer create its state, as a first step of size zero does; weights are left alone."""
        if self.inner.state:
            return
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 0.0
        for main in self._mains.values():
            main.grad = torch.zeros_like(main)
        self._step_inner()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        self.zero_grad(set_to_none=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # pyrefly: ignore[bad-override]
        """Load the inner optimizer's state; main parameters are no part of it and start from the weights."""
        self.inner.load_state_dict(state_dict)
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_without_params(inner))
        self._share_state()
        self.restart_from_weights()

    def _step_inner(self) -> None:
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_without_params(group))
        self.inner.step()
        for main in self.main_params.values():
            main.grad = None
        if len(self.state) != len(self.inner.state):
            self._share_state()

    def _share_state(self) -> None:
        # The same dictionaries under another key: what the inner optimizer changes in them shows here.
        self.state.clear()
        self.state.update({p: self.inner.state[main] for p, main in self._mains.items() if main in self.inner.state})

    @torch.no_grad()
    def _write_back(self) -> None:
        pairs = self.main_params
        if pairs:
            torch._foreach_copy_([_local(p) for p in pairs], [_local(main) for main in pairs.values()])


def _watch(module: nn.Module, optimizer: MainParamOptimizer) -> None:
    # Weak: a copy of the model keeps the hook but has parameters of its own, and an optimizer may be thrown away.
    watched, watcher = ref(module), ref(optimizer)

    def follow(loaded: nn.Module, _: object) -> None:
        follower = watcher()
        if follower is None or loaded is not watched():
            return
        parameters = list(loaded.parameters(recurse=False))
        known = {parameter for group in follower.param_groups for parameter in group["params"]}
        if any(parameter.requires_grad and parameter not in known for parameter in parameters):
            raise RuntimeError(
                "load_state_dict(assign=True) replaced parameters whose fp32 main parameters an optimizer holds: load "
                "without assign, or build the optimizer afterwards"
            )
        follower.take_over(parameters)

    module.register_load_state_dict_post_hook(follow)


def _main_of(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype not in _LOW_PRECISION:
        return parameter
    return nn.Parameter(parameter.detach().to(torch.float32))


def _local(parameter: nn.Parameter) -> Tensor:
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
