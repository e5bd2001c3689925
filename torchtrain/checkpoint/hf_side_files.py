"""What lies beside exported weights: ``config.json``, and a tokenizer from which Hugging Face has the ids of training.

``AutoTokenizer`` chooses a class by ``model_type``, and for some types (``qwen2``, ``qwen3_5_moe_text``) whatever
``tokenizer_class`` says; that class then cuts text in its own way, with the words of another tokenizer and without a
word about it. An ``auto_map`` beside ``tokenizer_class`` makes it go by the latter for every type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtrain.checkpoint.hf_folder import config_file_of, read_config
from torchtrain.data.tokenizer import SentencePieceTokenizer, Tokenizer
from torchtrain.hugging_face.model_config import ConfigFormat, write_config
from torchtrain.runtime.logging import get_logger

logger = get_logger(__name__)

_TOKENIZER_CONFIG = "tokenizer_config.json"
_GENERATION_CONFIG = "generation_config.json"
_CLASS_FILE = "tokenization_as_trained.py"
# For readers that trust the folder's code: they take the class from here, all others the same one from transformers.
_CLASS_TEXT = '''from transformers import PreTrainedTokenizerFast


class TokenizerAsTrained(PreTrainedTokenizerFast):
    """The tokenizer files beside this as they are, whatever class goes with the type of the model."""
'''

SIDE_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    _TOKENIZER_CONFIG,
    _CLASS_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    _GENERATION_CONFIG,
)
"""Whatever an export may hold beside weights and ``config.json``."""


@dataclass(frozen=True)
class SideFiles:
    """What lies beside the weights."""

    config: Mapping[str, Any]
    """Content of ``config.json``."""
    copies: Mapping[str, Path] = field(default_factory=dict)
    """Other files, by their name there."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Content of yet others, by name."""


def resolve_side_files(
    architecture: Any,
    config_format: ConfigFormat,
    *,
    dtype: str,
    hf_path: Path | None,
    tokenizer: Tokenizer | None,
    tokenizer_path: Path | None,
) -> SideFiles:
    """Decide what goes beside the weights: what they came with where that is what they were trained with.

    Args:
        architecture: Of the weights.
        config_format: The family's.
        dtype: Storage dtype of the weights, as in ``bfloat16``.
        hf_path: ``model.hf_path``; it may be gone.
        tokenizer: The job's; None where it cannot be read.
        tokenizer_path: Its file.
    """
    folder = None if hf_path is None else config_file_of(hf_path).parent
    copies = {name: folder / name for name in SIDE_FILES if folder and (folder / name).is_file()}
    texts: dict[str, str] = {}
    is_theirs = True
    if tokenizer is not None and tokenizer_path is not None and tokenizer_path.is_file():
        # The names that Hugging Face looks for, whatever the file is called.
        name = "tokenizer.model" if isinstance(tokenizer, SentencePieceTokenizer) else "tokenizer.json"
        is_theirs = name in copies and copies[name].read_bytes() == tokenizer_path.read_bytes()
        if not is_theirs:
            # The rest of another tokenizer would be taken for a part of this one.
            copies = {other: file for other, file in copies.items() if other == _GENERATION_CONFIG}
            copies[name] = tokenizer_path
        if _TOKENIZER_CONFIG not in copies:
            texts = {_TOKENIZER_CONFIG: _write_tokenizer_config(tokenizer), _CLASS_FILE: _CLASS_TEXT}
    elif tokenizer_path is not None:
        logger.warning(f"{tokenizer_path} cannot be read: the export gets what tokenizer model.hf_path has, if any")
    # A resumed run does without the folder that its weights once came from.
    source: Mapping[str, Any] | None = None
    if is_theirs and hf_path is not None and config_file_of(hf_path).is_file():
        source = read_config(hf_path)
    elif tokenizer is not None:
        source = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return SideFiles(write_config(architecture, config_format, dtype=dtype, source=source), copies, texts)


def _write_tokenizer_config(tokenizer: Tokenizer) -> str:
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "auto_map": {"AutoTokenizer": [None, f"{Path(_CLASS_FILE).stem}.TokenizerAsTrained"]},
        # Old versions would drop blanks before punctuation.
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    return json.dumps(content | {key: token for key, token in names.items() if token is not None}, indent=2) + "\n"
