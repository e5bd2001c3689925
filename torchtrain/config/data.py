"""Sections ``dataset`` and ``tokenizer``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from torchtrain.config.section import Section


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Section):
    """One source of documents."""

    path: str
    """A file, or a folder read recursively in name order."""
    name: str | None = None
    """Name in the logs; null is the path's stem."""
    weight: float = 1.0
    """Share of sequences drawn from here, relative to the other sources."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """File format; ``auto`` goes by suffix."""
    text_field: str = "text"
    """JSONL key or Parquet column that holds the text."""
    document_separator: str | None = None
    """Text files: split documents at this string; null makes one document per file."""

    @property
    def label(self) -> str:
        """What the source is called."""
        return self.name if self.name is not None else PurePath(self.path).stem


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(Section):
    """What is read and how it becomes sequences."""

    sources: tuple[SourceConfig, ...] = ()
    """Where documents come from."""
    packing: bool = True
    """Cut the stream of documents into full sequences; false gives each document sequences of its own, padded."""
    document_aware: bool = True
    """With packing: attention stays inside a document and positions restart with it."""
    shuffle: bool = True
    """Permute the sequences of a source anew in every epoch, from ``training.seed``."""
    holdout_fraction: float = 0.0
    """Last share of each source's sequences that is never trained on, for evaluation."""
    cache_dir: str = ".cache/datasets"
    """Where tokenised sources are kept."""
    num_workers: int = 0
    """Loader processes per rank."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Section):
    """How text becomes token ids."""

    kind: Literal["auto", "sentencepiece", "tokenizers", "bytes"] = "auto"
    """``auto`` goes by the path: ``.model``, ``tokenizer.json``, or bytes where there is none."""
    path: str | None = None
    """Tokenizer file."""
    add_bos: bool = True
    """Begin each document with the BOS token, where the tokenizer has one."""
    add_eos: bool = True
    """End each document with the EOS token, where the tokenizer has one."""
