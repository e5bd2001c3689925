"""Replay an oracle's choices of experts in other models, ours or Hugging Face's.

Shape legend: B = sequences, T = tokens, E = experts, K = experts a token visits, N = B * T.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torchtrain.nn.routing import BestScores, routers


class ReplayedChoice:
    """The experts that an oracle chose, whatever the scores; remembers what the scores would have chosen.

    Args:
        probabilities_BTE: The oracle's.

    Attributes:
        own_BTK: Our choice in the last forward.
    """

    def __init__(self, probabilities_BTE: Tensor) -> None:
        self._probabilities_BTE = probabilities_BTE
        self.own_BTK: Tensor | None = None

    def __call__(self, scores_BTE: Tensor, num_choices: int) -> Tensor:
        """See ``ExpertChoice``."""
        self.own_BTK = BestScores()(scores_BTE, num_choices)
        return self._probabilities_BTE.topk(num_choices, dim=-1).indices

    def lost_BT(self) -> Tensor:
        """The oracle's probability that our own choices give away; 0 where they are the oracle's."""
        assert self.own_BTK is not None, "read after a forward"
        best_BTK = self._probabilities_BTE.topk(self.own_BTK.shape[-1], dim=-1).values
        return best_BTK.sum(-1) - self._probabilities_BTE.gather(-1, self.own_BTK).sum(-1)


def replay_here(model: nn.Module, probabilities: Mapping[str, Tensor]) -> dict[str, ReplayedChoice]:
    """Let our model's tokens visit the experts that are best by ``probabilities_BTE``, by fqn of the router."""
    choices = {fqn: ReplayedChoice(probabilities_BTE) for fqn, probabilities_BTE in probabilities.items()}
    for fqn, router in routers(model):
        router.choice = choices.get(fqn, router.choice)
    return choices


def replay_in_hugging_face(model: nn.Module, probabilities: Mapping[str, Tensor]) -> None:
    """Do the same in Hugging Face's model, whose routers return logits, weights and experts of ``N`` tokens."""
    for fqn, probabilities_BTE in probabilities.items():
        router: Any = model.get_submodule("model." + fqn.removesuffix("router") + "gate")
        expert_ids_NK = probabilities_BTE.flatten(0, 1).topk(router.top_k, dim=-1).indices

        def replace(module: Any, _: object, out: Any, expert_ids_NK: Tensor = expert_ids_NK) -> Any:
            logits_NE, weights_NK, _ = out
            chosen_NK = logits_NE.float().softmax(dim=-1).gather(-1, expert_ids_NK)
            if getattr(module, "norm_topk_prob", True):
                chosen_NK = chosen_NK / chosen_NK.sum(dim=-1, keepdim=True)
            return logits_NE, chosen_NK.to(weights_NK.dtype), expert_ids_NK

        router.register_forward_hook(replace)
