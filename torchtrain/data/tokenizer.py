"""Text to token ids and back, for the three kinds of tokenizer that a job can name.

BOS and EOS are not added here: where a document begins and ends is known to who writes the token cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torchtrain.config.data import TokenizerConfig
from torchtrain.errors import DataError

# The names under which published tokenizers keep these two, for a tokenizer.json without a tokenizer_config.json.
_BOS_TOKENS = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]")
_EOS_TOKENS = ("</s>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "<eos>", "[EOS]")


class Tokenizer(Protocol):
    """A tokenizer as training needs it."""

    name: str
    """What errors call it."""
    fingerprint: str
    """Changes whenever the same text could give other ids."""
    vocab_size: int
    """One more than the largest id it can give."""
    bos_id: int | None
    eos_id: int | None
    bos_token: str | None
    """What its file calls BOS."""
    eos_token: str | None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without BOS and EOS."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, using all cores where the library does."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids; BOS and EOS give nothing."""
        ...


class BytesTokenizer:
    """The 256 bytes of UTF-8, then BOS and EOS."""

    name = "bytes"
    fingerprint = "bytes-258"
    vocab_size = 258
    bos_id: int | None = 256
    eos_id: int | None = 257
    bos_token: str | None = None
    eos_token: str | None = None

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the UTF-8 bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; bytes that are not UTF-8, as a model may sample, become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class SentencePieceTokenizer:
    """A sentencepiece ``.model`` file."""

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor  # here, for jobs that use another kind

        model = _read_file(path)
        try:
            self._processor = SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError) as error:
            raise DataError(f"{path}: not a sentencepiece model ({error}); point tokenizer.path to one") from error
        self.name = str(path)
        self.fingerprint = _fingerprint(model)
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id = _id_or_none(self._processor.bos_id())
        self.eos_id = _id_or_none(self._processor.eos_id())
        self.bos_token = None if self.bos_id is None else self._processor.id_to_piece(self.bos_id)
        self.eos_token = None if self.eos_id is None else self._processor.id_to_piece(self.eos_id)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return self._processor.encode(list(texts))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids."""
        return self._processor.decode(list(ids))


class JsonTokenizer:
    """A ``tokenizer.json`` of the ``tokenizers`` library; BOS and EOS as ``tokenizer_config.json`` beside it says."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Library  # here, for jobs that use another kind

        content = _read_file(path)
        try:
            self._library = Library.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: not a tokenizer.json ({error}); point tokenizer.path to one") from error
        self.name = str(path)
        special = _read_special_tokens(path.with_name("tokenizer_config.json"))
        self.bos_id = self._find_id(special["bos_token"] or _BOS_TOKENS)
        self.eos_id = self._find_id(special["eos_token"] or _EOS_TOKENS)
        self.bos_token = None if self.bos_id is None else self._library.id_to_token(self.bos_id)
        self.eos_token = None if self.eos_id is None else self._library.id_to_token(self.eos_id)
        self.fingerprint = _fingerprint(content)
        # Not the number of tokens: ids may have holes.
        self.vocab_size: int = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._library.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        # The fast form leaves out character offsets, which nobody here reads.
        return [e.ids for e in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids."""
        return self._library.decode(list(ids), skip_special_tokens=True)

    def _find_id(self, candidates: tuple[str, ...]) -> int | None:
        ids = (self._library.token_to_id(token) for token in candidates)
        return next((i for i in ids if i is not None), None)


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Load the tokenizer that section ``tokenizer`` names.

    Raises:
        DataError: The file is missing, of another kind, or its kind cannot be told from its name.
    """
    kind = _resolve_kind(config)
    if kind == "bytes":
        return BytesTokenizer()
    assert config.path is not None, "the rules of the job ask for it"
    path = Path(config.path)
    return SentencePieceTokenizer(path) if kind == "sentencepiece" else JsonTokenizer(path)


def _resolve_kind(config: TokenizerConfig) -> str:
    if config.kind != "auto":
        return config.kind
    if config.path is None:
        return "bytes"
    suffix_kinds = {".model": "sentencepiece", ".json": "tokenizers"}
    kind = suffix_kinds.get(Path(config.path).suffix)
    if kind is None:
        raise DataError(
            f"tokenizer.path = {config.path!r}: the kind shows in the name only for .model and tokenizer.json; "
            "set tokenizer.kind"
        )
    return kind


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot read the tokenizer ({error.strerror}); correct tokenizer.path") from error


def _read_special_tokens(path: Path) -> dict[str, tuple[str, ...]]:
    """Read the names of BOS and EOS; an empty tuple where the file does not say."""
    try:
        config = json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); correct or remove it") from error

    def read(key: str) -> tuple[str, ...]:
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        return (token,) if token else ()

    return {key: read(key) for key in ("bos_token", "eos_token")}


def _fingerprint(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _id_or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None
