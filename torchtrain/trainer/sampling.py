"""A short continuation at the end of a run, to see what was learned. No cache: for demonstration, not for serving."""

from __future__ import annotations

import torch
from torch import nn

from torchtrain.data.tokenizer import Tokenizer
from torchtrain.trainer.precision import ComputePrecision


@torch.no_grad()
def sample(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float,
    max_context: int,
    seed: int,
    device: torch.device,
    precision: ComputePrecision,
) -> str:
    """Continue ``prompt`` by ``num_tokens`` tokens, or until the end of a document.

    Every rank draws the same tokens, because forward passes of a sharded model are collective.

    Collective: the whole world, with equal arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = bos + list(tokenizer.encode(prompt))
    model.eval()
    for _ in range(num_tokens):
        window = torch.tensor([ids[-max_context:]], device=device)
        with precision.forward_context():
            logits_V = model(window)[0, -1].float().cpu()
        logits_V = logits_V[: tokenizer.vocab_size]
        if temperature == 0:
            next_id = int(logits_V.argmax())
        else:
            next_id = int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))
        if next_id == tokenizer.eos_id:
            break
        ids.append(next_id)
    model.train()
    return tokenizer.decode(ids[len(bos) :])
