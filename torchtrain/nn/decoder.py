"""The decoder every family is: embedding, blocks, final norm, head.

Shape legend: B = batch, T = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from torchtrain.nn.decoder_block import DecoderBlock
from torchtrain.nn.rms_norm import RMSNorm
from torchtrain.nn.rope import RopeConfig, build_rotary_table


class TokenLoss(Protocol):
    """How the head's input becomes token losses; tensor parallelism and chunking install their own."""

    def __call__(self, x_BTD: Tensor, lm_head: nn.Linear, labels_BT: Tensor) -> Tensor:
        """Score every token.

        Args:
            x_BTD: Normalised residual stream. Under sequence parallel this rank's share of the tokens.
            lm_head: The head, whose weight may be this rank's share of the vocabulary.
            labels_BT: int64, already shifted, of all tokens that this rank's losses are about.

        Returns:
            fp32 ``losses_BT``, exactly 0 with no gradient where the label is ignored.
        """
        ...


class Decoder(nn.Module):
    """A causal language model on one device, or one pipeline stage of it.

    Any of ``embed_tokens``, ``norm`` and ``lm_head`` may be ``None``, and any entry of ``layers`` missing: what is
    absent is passed over, and what remains keeps its name. Names are Hugging Face's without the leading ``model.``.

    Attributes:
        token_loss: The ``TokenLoss`` in use; replace it to install another.
    """

    def __init__(
        self,
        *,
        embed_tokens: nn.Embedding,
        layers: Iterable[DecoderBlock],
        norm: RMSNorm,
        lm_head: nn.Linear,
        rope: RopeConfig,
        tie_word_embeddings: bool,
        token_loss: TokenLoss,
    ) -> None:
        super().__init__()
        self.embed_tokens: nn.Embedding | None = embed_tokens
        self.layers = nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)})
        self.norm: RMSNorm | None = norm
        self.lm_head: nn.Linear | None = lm_head
        self.rope = rope
        self.token_loss = token_loss
        if tie_word_embeddings:
            lm_head.weight = embed_tokens.weight

    def forward(
        self,
        inputs: Tensor,
        positions_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        labels_BT: Tensor | None = None,
    ) -> Tensor:
        """Compute token losses where there are labels, else logits; on a stage without a head the residual stream.

        The loss is part of the forward, so that it may read the head's weight while that is gathered, and never needs
        all logits at once.

        Args:
            inputs: ``input_ids_BT`` int64, or on a stage without embedding the residual stream ``x_BTD``.
            positions_BT: int64 position of each token in its document; ``None`` counts along the row. A family with
                several position axes takes ``positions_ABT`` too: see ``build_rotary_table``.
            document_ids_BT: Integer ids, equal inside a document; ``None`` where a row is one document. Under context
                parallel those of the whole row.
            labels_BT: int64, already shifted.

        Returns:
            ``losses_BT`` in fp32, or ``logits_BTV`` in the residual stream's dtype, or ``x_BTD``.
        """
        x_BTD = inputs if self.embed_tokens is None else self.embed_tokens(inputs)
        blocks = self.blocks()
        if blocks:
            if positions_BT is None:
                positions_BT = torch.arange(inputs.shape[1], device=inputs.device)[None]
            rope = build_rotary_table(positions_BT, self.rope)
            masks = _build_masks(blocks, document_ids_BT)
            for block in blocks:
                x_BTD = block(x_BTD, rope, masks[type(block.mixer.core)])
        if self.norm is not None:
            x_BTD = self.norm(x_BTD)
        if self.lm_head is None:
            return x_BTD
        # Blocks may return another dtype than they compute in (``mix_precision.output_dtype``).
        compute_dtype = self.lm_head.weight.dtype
        if labels_BT is not None:
            return self.token_loss(x_BTD.to(compute_dtype), self.lm_head, labels_BT)
        return self.lm_head(x_BTD.to(compute_dtype)).to(x_BTD.dtype)

    def blocks(self) -> list[DecoderBlock]:
        """List this stage's blocks in execution order."""
        return [cast(DecoderBlock, block) for block in self.layers.values()]


def _build_masks(blocks: Iterable[DecoderBlock], document_ids_BT: Tensor | None) -> dict[type, Tensor | None]:
    """Build what keeps documents apart once for each class of core, from document ids alone."""
    if document_ids_BT is not None and document_ids_BT.ndim != 2:
        raise ValueError(f"document ids are one number a token, not of shape {tuple(document_ids_BT.shape)}")
    cores = {type(block.mixer.core): block.mixer.core for block in blocks}
    return {kind: core.build_mask(document_ids_BT) for kind, core in cores.items()}
