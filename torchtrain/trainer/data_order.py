"""What decides which tokens sequence ``i`` of a run is, kept in every checkpoint.

A run that resumes with other values is not wrong, but it repeats some sequences and misses others, and should know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torchtrain.config.job import Job
from torchtrain.data.tokenizer import Tokenizer


def describe_data_order(job: Job, tokenizer: Tokenizer) -> dict[str, Any]:
    """List what decides the order of the data, as JSON values by job path.

    The global batch size is not among them: a run continues at the sequence after the last one it has read.
    """
    dataset = job.dataset
    return {
        "training.seed": job.training.seed,
        "training.seq_len": job.training.seq_len,
        "dataset.sources": [asdict(source) for source in dataset.sources],
        "dataset.packing": dataset.packing,
        "dataset.document_aware": dataset.document_aware,
        "dataset.shuffle": dataset.shuffle,
        "dataset.holdout_fraction": dataset.holdout_fraction,
        "tokenizer": tokenizer.fingerprint,
        "tokenizer.add_bos": job.tokenizer.add_bos,
        "tokenizer.add_eos": job.tokenizer.add_eos,
    }


def find_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Say where the order that a checkpoint was trained on differs from this job's."""
    return [
        f"{key}: {saved[key]!r} in the checkpoint, {value!r} now"
        for key, value in current.items()
        if key in saved and saved[key] != value
    ]
