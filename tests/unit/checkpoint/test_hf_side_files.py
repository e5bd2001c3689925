"""The tokenizer beside exported weights: through Hugging Face it gives the ids of training, whatever the family."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from models.registry import FAMILIES, load_spec, resolve_architecture
from torchtrain.checkpoint.hf_side_files import SideFiles, resolve_side_files
from torchtrain.config.data import TokenizerConfig
from torchtrain.data.tokenizer import Tokenizer, build_tokenizer

SENTENCEPIECE = Path(__file__).parents[3] / "assets" / "tokenizer" / "shakespeare_4k.model"
TEXTS = (
    "HAMLET. To be",
    " leading",
    "  two  blanks ,  ",
    "a\n\nb\n c",
    "\n start",
    "naïve 漢字 🙂\tit's 1234",
    "ﬁne e\u0301",
)


@pytest.fixture(scope="module")
def json_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes, split at blanks alone: cut as no published tokenizer cuts."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(TEXTS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "ours.json"
    library.save(str(path))
    return path


def resolve(
    tokenizer: Tokenizer | None, path: Path | None, *, family: str = "qwen2", hf_path: Path | None = None
) -> SideFiles:
    return resolve_side_files(
        resolve_architecture(family, "debug", {}),
        load_spec(family).hugging_face.config,
        dtype="float32",
        hf_path=hf_path,
        tokenizer=tokenizer,
        tokenizer_path=path,
    )


def write(side_files: SideFiles, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(side_files.config))
    for name, file in side_files.copies.items():
        (folder / name).write_bytes(file.read_bytes())
    for name, text in side_files.texts.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("kind", ["sentencepiece", "json"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_gives_the_ids_of_training_and_the_texts_back(
    tmp_path: Path, json_path: Path, family: str, kind: str
) -> None:
    path = SENTENCEPIECE if kind == "sentencepiece" else json_path
    ours = build_tokenizer(TokenizerConfig(path=str(path)))
    folder = write(resolve(ours, path, family=family), tmp_path / "exported")
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids, text
        assert theirs.decode(ids) == ours.decode(ids) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert len(theirs) == ours.vocab_size


def test_a_reader_that_trusts_the_folders_code_finds_it_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    ours = build_tokenizer(TokenizerConfig(path=str(SENTENCEPIECE)))
    folder = write(resolve(ours, SENTENCEPIECE), tmp_path / "exported")
    theirs: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert theirs(TEXTS[0])["input_ids"] == ours.encode(TEXTS[0])


def test_what_weights_came_with_is_kept_where_the_job_was_trained_with_it_and_nothing_of_it_elsewhere(
    tmp_path: Path, json_path: Path
) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": 77}))
    (folder / "tokenizer.json").write_bytes(json_path.read_bytes())
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_text("{}")
    published = {file.name: file for file in folder.iterdir() if file.name != "config.json"}
    for path in (json_path, folder / "tokenizer.json"):
        kept = resolve(build_tokenizer(TokenizerConfig(path=str(path))), path, hf_path=folder)
        assert (kept.copies, kept.texts, kept.config["eos_token_id"]) == (published, {}, 77)
    own = resolve(build_tokenizer(TokenizerConfig(path=str(SENTENCEPIECE))), SENTENCEPIECE, hf_path=folder)
    assert own.copies == {
        "tokenizer.model": SENTENCEPIECE,
        "generation_config.json": folder / "generation_config.json",
    }
    assert json.loads(own.texts["tokenizer_config.json"])["eos_token"] == "</s>"
    assert own.config["eos_token_id"] == 2


def test_a_tokenizer_goes_by_its_kind_and_not_by_the_name_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "pieces"
    path.write_bytes(SENTENCEPIECE.read_bytes())
    tokenizer = build_tokenizer(TokenizerConfig(path=str(path), kind="sentencepiece"))
    assert resolve(tokenizer, path).copies == {"tokenizer.model": path}


def test_a_tokenizer_that_is_gone_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        lost = resolve(None, tmp_path / "lost.model")
    assert (lost.copies, lost.texts) == ({}, {})
    assert "lost.model cannot be read: the export gets" in caplog.text
