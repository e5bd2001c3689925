from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from torchtrain.config.data import TokenizerConfig
from torchtrain.data.tokenizer import Tokenizer, build_tokenizer
from torchtrain.errors import DataError

TEXT = "To be, or not to be:\nthat is the question. "
ASSETS = Path(__file__).parents[3] / "assets"


@pytest.fixture
def sentencepiece_path(tmp_path: Path) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines() * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path / "tiny.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture
def json_path(tmp_path: Path) -> Path:
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<go>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([TEXT], trainer)
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    return path


def assert_usable(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.encode_batch([TEXT, "be"]) == [ids, tokenizer.encode("be")]
    framed = [tokenizer.bos_id, *ids, tokenizer.eos_id]
    assert all(i is not None for i in framed)
    assert tokenizer.bos_id not in ids
    assert tokenizer.eos_id not in ids


def test_bytes_are_the_kind_without_a_path() -> None:
    tokenizer = build_tokenizer(TokenizerConfig())
    assert_usable(tokenizer)
    assert tokenizer.vocab_size == 258
    assert tokenizer.decode([256, *tokenizer.encode("naïve 漢"), 257]) == "naïve 漢"
    assert tokenizer.decode([0xFF]) == "\N{REPLACEMENT CHARACTER}"


def test_sentencepiece_model_goes_by_suffix(sentencepiece_path: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(path=str(sentencepiece_path)))
    assert_usable(tokenizer)
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("not to be"), tokenizer.eos_id]) == "not to be"


def test_sentencepiece_without_bos_has_none(tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines() * 4),
        model_writer=model,
        vocab_size=40,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "x.model").write_bytes(model.getvalue())
    assert build_tokenizer(TokenizerConfig(path=str(tmp_path / "x.model"))).bos_id is None


def test_tokenizer_json_goes_by_suffix_and_finds_usual_specials(json_path: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(path=str(json_path)))
    assert_usable(tokenizer)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.decode([0, *tokenizer.encode(TEXT), 1]) == TEXT


def test_tokenizer_config_beside_it_names_the_specials(json_path: Path) -> None:
    config = {"bos_token": {"content": "<go>"}, "eos_token": "</s>"}
    json_path.with_name("tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = build_tokenizer(TokenizerConfig(path=str(json_path)))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (2, 1)


def test_vocab_size_covers_ids_with_holes(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 900}, unk_token="a"))
    library.save(str(tmp_path / "tokenizer.json"))
    assert build_tokenizer(TokenizerConfig(path=str(tmp_path / "tokenizer.json"))).vocab_size == 901


@pytest.mark.parametrize(
    ("config", "content", "message"),
    [
        (TokenizerConfig(path="lost.model"), None, "lost.model: cannot read the tokenizer"),
        (TokenizerConfig(path="x.model"), b"garbage", "x.model: not a sentencepiece model"),
        (TokenizerConfig(path="tokenizer.json"), b"{}", "tokenizer.json: not a tokenizer.json"),
        (TokenizerConfig(path="words.vocab"), b"", "set tokenizer.kind"),
    ],
)
def test_bad_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: TokenizerConfig, content: bytes | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None and config.path is not None:
        Path(config.path).write_bytes(content)
    with pytest.raises(DataError, match=message):
        build_tokenizer(config)


def test_the_shipped_tokenizer_gives_the_shipped_corpus_back() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(path=str(ASSETS / "tokenizer" / "shakespeare_4k.model")))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (4096, 1, 2)
    texts = [path.read_text() for path in sorted((ASSETS / "corpus").glob("*.txt"))]
    encoded = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert sum(map(len, texts)) / sum(map(len, encoded)) > 3.0  # characters per token
