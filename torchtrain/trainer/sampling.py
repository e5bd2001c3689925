"""A short continuation at the end of a run, to see what was learned. No cache: for demonstration, not for serving."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtrain.data.tokenizer import Tokenizer
from torchtrain.trainer.forward_backward import ForwardBackward
from torchtrain.trainer.stopping import ShouldStop


def sample(
    model: nn.Module,
    forward_backward: ForwardBackward,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    add_bos: bool,
    num_tokens: int,
    temperature: float,
    max_context: int,
    seed: int,
    device: torch.device,
    should_stop: ShouldStop,
) -> str | None:
    """Continue ``prompt`` by ``num_tokens`` tokens, or until the end of a document.

    Returns:
        None where a signal cut it short, which is looked for before every token.

    Every rank computes, because forward passes of a sharded model are collective. Rank 0 draws for all: logits of
    another rank may differ in their last bit, and its next window would be another one.

    Collective: the whole world, with equal arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    beginning = _begin_document(tokenizer, add_bos=add_bos)
    ids = beginning + list(tokenizer.encode(prompt))
    if not ids:
        # Nothing to continue: after the end of one document begins another.
        ids = beginning = [0 if tokenizer.eos_id is None else tokenizer.eos_id]
    is_whole = True
    model.eval()
    for _ in range(num_tokens):
        if should_stop():
            is_whole = False
            break
        logits_V = forward_backward.next_token_logits(ids[-max_context:])[: tokenizer.vocab_size]
        drawn = _draw(logits_V.float().cpu(), temperature, generator).to(device)
        dist.broadcast(drawn, src=0)
        next_id = int(drawn)
        if next_id == tokenizer.eos_id:
            break
        ids = [*ids, next_id]
    forward_backward.end_forwards()
    model.train()
    return tokenizer.decode(ids[len(beginning) :]) if is_whole else None


def _begin_document(tokenizer: Tokenizer, *, add_bos: bool) -> list[int]:
    """Begin as the documents that were trained on do."""
    return [tokenizer.bos_id] if add_bos and tokenizer.bos_id is not None else []


def _draw(logits_V: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits_V.argmax().reshape(1)
    return torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)
