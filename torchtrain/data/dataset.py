"""Sequence ``i`` of a run, for any ``i``: the same tokens whatever the ranks, the workers or the restarts.

``i`` goes through three pure functions: the mixture names a source and a place in it, the epoch's permutation names a
sequence of that source, the layout cuts the sequence out of the token cache. A source that runs out begins its next
epoch in a new order, on its own: sources of different sizes have epochs of different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchtrain.config.data import SourceConfig
from torchtrain.config.job import Job
from torchtrain.data.cache import TokenCache, load_or_build_cache
from torchtrain.data.mixture import build_mixture, interleave
from torchtrain.data.packing import SequenceLayout, TokenSequence, build_layout, build_padding_sequence
from torchtrain.data.tokenizer import Tokenizer
from torchtrain.errors import DataError
from torchtrain.runtime.logging import get_logger
from torchtrain.runtime.seed import derive_seed

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class EpochOrder:
    """In which order one epoch of a source reads its sequences."""

    epoch: int
    order: NDArray[np.unsignedinteger]


class SequenceDataset:
    """All sequences of a job, by index.

    The last ``holdout_fraction`` of each source's sequences, in the order of the files, is for evaluation only: no
    epoch trains on it.
    """

    def __init__(
        self,
        layouts: Sequence[SequenceLayout],
        *,
        names: Sequence[str],
        weights: Sequence[float],
        holdout_fraction: float,
        padding: TokenSequence,
        seed: int | None,
    ) -> None:
        """Split each source and mix the parts.

        Args:
            layouts: The sequences of each source.
            names: What each source is called.
            weights: Share of each source in training.
            holdout_fraction: Share of each source's sequences kept for evaluation.
            padding: A sequence with nothing to learn.
            seed: Decides the order of every epoch; ``None`` keeps the order of the files.
        """
        self.source_names = tuple(names)
        self.padding = padding
        self._layouts = tuple(layouts)
        self._seed = seed
        # Of each source the epoch in use: readers move forward, and an order takes four bytes a sequence.
        self._orders: dict[int, EpochOrder] = {}
        eval_counts = [_count_held_out(len(layout), holdout_fraction) for layout in layouts]
        self._train_counts = [len(layout) - held_out for layout, held_out in zip(layouts, eval_counts, strict=True)]
        self._mixture = build_mixture(weights)
        # Each prefix of the evaluation order has every source in proportion, so that a short evaluation sees them all.
        self._eval_order = interleave(eval_counts)
        self.num_train_sequences = sum(self._train_counts)
        self.num_eval_sequences = sum(eval_counts)

    def train_sequence(self, index: int) -> TokenSequence:
        """Assemble the ``index``-th sequence of the run, counted from 0 and without end."""
        slot = self._mixture.locate(index)
        epoch, place = divmod(slot.index, self._train_counts[slot.source])
        return self._layouts[slot.source].read(self._shuffle(slot.source, epoch, place))

    def eval_sequence(self, index: int) -> TokenSequence:
        """Assemble a held-out sequence, ``index`` below ``num_eval_sequences``; always in the same order."""
        if not 0 <= index < self.num_eval_sequences:
            raise IndexError(f"held-out sequence {index} of {self.num_eval_sequences}")
        slot = self._eval_order.locate(index)
        return self._layouts[slot.source].read(self._train_counts[slot.source] + slot.index)

    def _shuffle(self, source: int, epoch: int, place: int) -> int:
        if self._seed is None:
            return place
        current = self._orders.get(source)
        if current is None or current.epoch != epoch:
            seed = derive_seed(self._seed, "data order", self.source_names[source], epoch)
            current = EpochOrder(epoch, _draw_permutation(seed, self._train_counts[source]))
            self._orders[source] = current
        return int(current.order[place])


def build_dataset(job: Job, tokenizer: Tokenizer, *, vocab_size: int, show_progress: bool) -> SequenceDataset:
    """Tokenise what is not in the cache yet, and open the sequences of a job.

    Every rank calls this: one of those that share a disk tokenises, the others wait for it. No process group is needed.

    Args:
        job: The whole job; read are ``dataset``, ``tokenizer`` and of ``training`` the ``seq_len`` and ``seed``.
        tokenizer: From ``build_tokenizer``.
        vocab_size: Rows of the model's embedding.
        show_progress: Show a bar, if it is this process that tokenises and it has a terminal.

    Raises:
        DataError: A source or the cache cannot be used, is too short, or has token ids that the model does not know.
    """
    config = job.dataset
    _check_vocabulary(tokenizer, tokenizer.vocab_size, vocab_size)
    names = [source.label for source in config.sources]
    layouts = []
    for source_id, (name, source) in enumerate(zip(names, config.sources, strict=True)):
        cache = load_or_build_cache(
            source,
            name=name,
            tokenizer=tokenizer,
            tokenizer_config=job.tokenizer,
            cache_dir=Path(config.cache_dir),
            show_progress=show_progress,
        )
        _check_vocabulary(tokenizer, cache.header.max_token_id + 1, vocab_size)
        layout = build_layout(
            cache,
            seq_len=job.training.seq_len,
            packing=config.packing,
            document_aware=config.document_aware,
            source_id=source_id,
        )
        _check_length(layout, cache, source, job)
        layouts.append(layout)
    dataset = SequenceDataset(
        layouts,
        names=names,
        weights=[source.weight for source in config.sources],
        holdout_fraction=config.holdout_fraction,
        padding=build_padding_sequence(job.training.seq_len, document_aware=config.document_aware),
        seed=job.training.seed if config.shuffle else None,
    )
    _LOG.info(
        "data: %d training and %d held-out sequences of %d tokens from %s",
        dataset.num_train_sequences,
        dataset.num_eval_sequences,
        job.training.seq_len,
        ", ".join(names),
    )
    return dataset


def _draw_permutation(seed: int, count: int) -> NDArray[np.unsignedinteger]:
    dtype = np.uint32 if count <= 1 << 32 else np.uint64
    return np.random.Generator(np.random.PCG64(seed)).permutation(np.arange(count, dtype=dtype))


def _count_held_out(num_sequences: int, fraction: float) -> int:
    """At least one is held out where any should be, and at least one stays to train on."""
    return min(num_sequences - 1, max(1, round(num_sequences * fraction))) if fraction > 0 else 0


def _check_vocabulary(tokenizer: Tokenizer, num_ids: int, vocab_size: int) -> None:
    if num_ids > vocab_size:
        raise DataError(
            f"tokenizer {tokenizer.name} gives token ids up to {num_ids - 1} (vocabulary {tokenizer.vocab_size}), but "
            f"the model's vocabulary is {vocab_size}; set model.overrides.vocab_size to at least {num_ids}"
        )


def _check_length(layout: SequenceLayout, cache: TokenCache, source: SourceConfig, job: Job) -> None:
    """Refuse a source too short to train on: padding it up would hide that there is nothing to pack."""
    needed = "2 sequences (one is held out)" if job.dataset.holdout_fraction > 0 else "1 sequence"
    if len(layout) < int(needed[0]):
        way_out = ", or set dataset.packing to false" if job.dataset.packing else ""
        raise DataError(
            f"{source.path}: its {cache.header.num_tokens} tokens give {len(layout)} sequences of training.seq_len = "
            f"{job.training.seq_len} + 1 tokens, at least {needed} must come out; add text or shorten "
            f"training.seq_len{way_out}"
        )
