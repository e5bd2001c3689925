from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from torchtrain.config.data import DatasetConfig, SourceConfig
from torchtrain.config.job import Job
from torchtrain.config.training import TrainingConfig
from torchtrain.data.dataset import SequenceDataset, build_dataset
from torchtrain.data.tokenizer import BytesTokenizer


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., SourceConfig]:
    """Write texts to a JSONL file and return the source that reads it."""

    def write(stem: str, texts: Sequence[str], **options: Any) -> SourceConfig:
        path = tmp_path / f"{stem}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return SourceConfig(path=str(path), **options)

    return write


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., SequenceDataset]:
    """Build the dataset of some sources with the bytes tokenizer, short sequences and a cache of its own."""

    def make(*sources: SourceConfig, seq_len: int = 8, seed: int = 0, vocab_size: int = 258, **options: Any):
        job = Job(
            dataset=DatasetConfig(sources=sources, cache_dir=str(tmp_path / "cache"), **options),
            training=TrainingConfig(seq_len=seq_len, seed=seed),
        )
        return build_dataset(job, BytesTokenizer(), vocab_size=vocab_size, show_progress=False)

    return make
