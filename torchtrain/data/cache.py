"""Tokens of a source on disk: written once, mapped into memory by every rank and worker.

A cache is a folder ``<name>-<fingerprint>`` of three files: ``tokens.bin`` (one flat array), ``offsets.bin`` (where
each document begins, then where the last one ends) and ``header.json``. The fingerprint covers whatever decides the
tokens: the source's files (path, size, time of change), how they are read, and the tokenizer. Another fingerprint is
another folder, so that a running job never loses the cache under its feet; old folders may be deleted whenever nobody
trains from them.

A cache appears whole or not at all: it is written to a temporary folder under a file lock, and renamed. Whoever
waited for the lock finds it done. A lock dies with its process; what a killed writer left behind is removed by the
next one of its host. Nodes whose shared disk keeps no locks may all write: each in a folder of its own, and the first
that is done wins.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from torchtrain.config.data import SourceConfig, TokenizerConfig
from torchtrain.data.sources import SourceFile, list_files, read_documents
from torchtrain.data.tokenizer import Tokenizer
from torchtrain.errors import DataError
from torchtrain.runtime.host import host_name
from torchtrain.runtime.logging import get_logger

_LOG = get_logger(__name__)
_FORMAT_VERSION = 1
_BATCH_CHARACTERS = 1 << 22  # enough to keep a multi-threaded tokenizer busy


@dataclass(frozen=True)
class CacheHeader:
    """What the files of a cache must look like."""

    version: int
    fingerprint: str
    dtype: str
    num_tokens: int
    num_documents: int
    max_token_id: int


@dataclass(frozen=True)
class TokenCache:
    """The tokens of one source, mapped from disk."""

    folder: Path
    header: CacheHeader
    tokens: NDArray[np.unsignedinteger]
    offsets: NDArray[np.int64]

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        """Send a worker process the folder, not a copy of every token."""
        return open_cache, (self.folder,)


@dataclass(frozen=True)
class CacheRecipe:
    """All that decides the tokens of a source."""

    name: str
    source: SourceConfig
    files: tuple[SourceFile, ...]
    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every token id."""
        return np.dtype(np.uint16 if self.tokenizer.vocab_size <= 1 << 16 else np.uint32)

    @property
    def folder_stem(self) -> str:
        """The source's name without what a file name may not hold."""
        return re.sub(r"[^\w.-]", "_", self.name)

    @property
    def fingerprint(self) -> str:
        """Hash whatever could change a token."""
        facts = {
            "version": _FORMAT_VERSION,
            "files": [(str(f.path.resolve()), f.format, f.num_bytes, f.modified_ns) for f in self.files],
            "text_field": self.source.text_field,
            "document_separator": self.source.document_separator,
            "tokenizer": self.tokenizer.fingerprint,
            "bos_eos": (self.bos_id, self.eos_id),
        }
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def load_or_build_cache(
    source: SourceConfig,
    *,
    name: str,
    tokenizer: Tokenizer,
    tokenizer_config: TokenizerConfig,
    cache_dir: Path,
    show_progress: bool,
) -> TokenCache:
    """Map the tokens of a source, tokenising it first where nobody has yet.

    Any number of processes may call this at once: one writes, the others wait for it.

    Raises:
        DataError: The source cannot be read or holds no text, or the cache cannot be written.
    """
    recipe = CacheRecipe(
        name=name,
        source=source,
        files=list_files(source),
        tokenizer=tokenizer,
        bos_id=tokenizer.bos_id if tokenizer_config.add_bos else None,
        eos_id=tokenizer.eos_id if tokenizer_config.add_eos else None,
    )
    folder = cache_dir / f"{recipe.folder_stem}-{recipe.fingerprint}"
    if is_whole(folder):  # without the lock: a cache appears whole, and may lie on a read-only disk
        return open_cache(folder)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _hold_lock(folder.with_name(f"{folder.name}.lock"), name):
            if not is_whole(folder):
                _build(recipe, folder, show_progress=show_progress)
    except OSError as error:
        raise DataError(f"{cache_dir}: cannot write the token cache ({error}); set dataset.cache_dir") from error
    return open_cache(folder)


def is_whole(folder: Path) -> bool:
    """Tell whether a cache is there with every byte that its header promises."""
    try:
        header = _read_header(folder)
        tokens_size = (folder / "tokens.bin").stat().st_size
        offsets_size = (folder / "offsets.bin").stat().st_size
    except (OSError, ValueError, TypeError):
        return False
    return (
        header.version == _FORMAT_VERSION
        and tokens_size == header.num_tokens * np.dtype(header.dtype).itemsize
        and offsets_size == (header.num_documents + 1) * 8
    )


def open_cache(folder: Path) -> TokenCache:
    """Map a whole cache."""
    header = _read_header(folder)
    tokens = np.memmap(folder / "tokens.bin", dtype=header.dtype, mode="r")
    offsets = np.memmap(folder / "offsets.bin", dtype=np.int64, mode="r")
    return TokenCache(folder, header, tokens, offsets)


def _read_header(folder: Path) -> CacheHeader:
    return CacheHeader(**json.loads((folder / "header.json").read_bytes()))


@contextmanager
def _hold_lock(path: Path, name: str) -> Generator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _LOG.info("waiting for another process to tokenise %s", name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(recipe: CacheRecipe, folder: Path, *, show_progress: bool) -> None:
    """Write a cache beside its place, then move it there. The caller holds the lock."""
    own_name = f"{folder.name}.partial-{host_name()}"
    for leftover in folder.parent.glob(f"{glob.escape(own_name)}-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a writer that was killed: the lock of this host is ours
    temporary = folder.with_name(f"{own_name}-{os.getpid()}")
    temporary.mkdir()
    _LOG.info("tokenising %s (%d files) with %s", recipe.source.path, len(recipe.files), recipe.tokenizer.name)
    try:
        header = _write_tokens(recipe, temporary, show_progress=show_progress)
        with _open_durable(temporary / "header.json") as stream:
            stream.write(json.dumps(asdict(header), indent=1).encode())
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _publish(temporary, folder)
    _LOG.info("tokenised %s: %d documents, %d tokens", recipe.source.path, header.num_documents, header.num_tokens)


def _publish(temporary: Path, folder: Path) -> None:
    """Move a finished cache to its place, unless another node was faster."""
    if folder.exists() and not is_whole(folder):
        _LOG.warning("%s is damaged and replaced", folder)
        damaged = temporary.with_name(f"{temporary.name}-damaged")
        folder.rename(damaged)
        shutil.rmtree(damaged)
    try:
        temporary.rename(folder)
    except OSError:
        if not is_whole(folder):
            raise
        shutil.rmtree(temporary)


def _write_tokens(recipe: CacheRecipe, folder: Path, *, show_progress: bool) -> CacheHeader:
    num_tokens, num_documents, max_token_id = 0, 0, -1
    with _open_durable(folder / "tokens.bin") as tokens, _open_durable(folder / "offsets.bin") as offsets:
        offsets.write(np.int64(0).tobytes())
        for texts in _read_batches(recipe, show_progress=show_progress):
            documents = [_frame(ids, recipe) for ids in recipe.tokenizer.encode_batch(texts)]
            lengths = np.array([len(ids) for ids in documents], np.int64)
            flat = np.fromiter(chain.from_iterable(documents), np.int64, count=int(lengths.sum()))
            max_token_id = max(max_token_id, int(flat.max(initial=-1)))
            tokens.write(flat.astype(recipe.dtype).tobytes())
            offsets.write((num_tokens + np.cumsum(lengths)).tobytes())
            num_tokens += len(flat)
            num_documents += len(documents)
    if num_tokens == 0:
        raise DataError(
            f"{recipe.source.path}: the source holds no text; add documents or remove it from dataset.sources"
        )
    if max_token_id >= recipe.tokenizer.vocab_size:
        raise DataError(
            f"{recipe.tokenizer.name}: gave token id {max_token_id}, but says it has {recipe.tokenizer.vocab_size}; "
            "the tokenizer file is broken, use another"
        )
    return CacheHeader(
        version=_FORMAT_VERSION,
        fingerprint=recipe.fingerprint,
        dtype=recipe.dtype.name,
        num_tokens=num_tokens,
        num_documents=num_documents,
        max_token_id=max_token_id,
    )


def _frame(ids: list[int], recipe: CacheRecipe) -> list[int]:
    begin = [] if recipe.bos_id is None else [recipe.bos_id]
    end = [] if recipe.eos_id is None else [recipe.eos_id]
    return begin + ids + end


def _read_batches(recipe: CacheRecipe, *, show_progress: bool) -> Iterator[list[str]]:
    """Yield the source's texts in portions worth a call of the tokenizer, with a bar on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("tokenising {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (show_progress and console.is_terminal)) as progress:
        task = progress.add_task(recipe.name, total=sum(file.num_bytes for file in recipe.files))
        texts: list[str] = []
        num_characters = 0
        for document in chain.from_iterable(read_documents(file, recipe.source) for file in recipe.files):
            texts.append(document.text)
            num_characters += len(document.text)
            progress.advance(task, document.source_bytes)
            if num_characters >= _BATCH_CHARACTERS:
                yield texts
                texts, num_characters = [], 0
        if texts:
            yield texts


@contextmanager
def _open_durable(path: Path) -> Generator[BinaryIO]:
    """Open for writing; on leaving, the bytes are on the disk, not only on their way there."""
    with path.open("wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
