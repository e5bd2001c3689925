"""Read documents out of text, JSONL and Parquet files, one at a time, in an order that is always the same.

Not for tokens: text is all this file knows. Every bad input is refused with the file, the place in it and the way out.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from torchtrain.config.data import SourceConfig
from torchtrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow

_FORMAT_OF_SUFFIX = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class SourceFile:
    """A file of a source and how it is read."""

    path: Path
    format: str
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True)
class Document:
    """One text, and the share of its file's bytes that reading it used up (for a progress bar)."""

    text: str
    source_bytes: float


def list_files(source: SourceConfig) -> tuple[SourceFile, ...]:
    """Find the files of a source: the file it names, or those of its folder, recursively, in name order.

    Hidden files and folders are left out; with ``format: auto`` so are files of a folder with an unknown suffix.

    Raises:
        DataError: Nothing is there, the suffix says no format, or a folder has no readable file.
    """
    root = Path(source.path)
    if root.is_file():
        return (_describe(root, source),)
    if not root.is_dir():
        raise DataError(f"{root}: no such file or folder; correct the path in dataset.sources")
    inside = sorted(root.rglob("*"), key=lambda path: path.relative_to(root).parts)
    visible = [p for p in inside if p.is_file() and not any(part.startswith(".") for part in p.relative_to(root).parts)]
    readable = [p for p in visible if source.format != "auto" or p.suffix.lower() in _FORMAT_OF_SUFFIX]
    if not readable:
        raise DataError(
            f"{root}: the folder has no file to read; put files ending in {_suffixes()} there, or set the source's "
            "format to read every file in it as such"
        )
    return tuple(_describe(path, source) for path in readable)


def read_documents(file: SourceFile, source: SourceConfig) -> Iterator[Document]:
    """Yield the documents of one file. Those of nothing but white space are left out.

    Raises:
        DataError: The file cannot be read as its format says.
    """
    try:
        if file.format == "parquet":
            documents = _read_parquet(file, source.text_field)
        elif file.format == "jsonl":
            documents = _read_jsonl(file, source.text_field)
        else:
            documents = _read_text(file, source.document_separator)
        yield from (document for document in documents if document.text.strip())
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read ({error}); check the file and its permissions") from error


def _describe(path: Path, source: SourceConfig) -> SourceFile:
    file_format = source.format if source.format != "auto" else _FORMAT_OF_SUFFIX.get(path.suffix.lower())
    if file_format is None:
        raise DataError(
            f"{path}: the suffix {path.suffix!r} says no format (known: {_suffixes()}); rename the file or set the "
            "source's format to text, jsonl or parquet"
        )
    stat = path.stat()
    return SourceFile(path=path, format=file_format, num_bytes=stat.st_size, modified_ns=stat.st_mtime_ns)


def _suffixes() -> str:
    return ", ".join(_FORMAT_OF_SUFFIX)


def _read_text(file: SourceFile, separator: str | None) -> Iterator[Document]:
    with file.path.open("rb") as stream:
        offset = 0
        for line_number, piece in _split_stream(stream, separator):
            yield Document(_decode(piece, file.path, line=line_number, offset=offset), len(piece))
            offset += len(piece) + len((separator or "").encode())


def _split_stream(stream: BinaryIO, separator: str | None) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces between separators, each with the number of its first line, without holding the whole file."""
    if not separator:
        yield 1, stream.read()
        return
    mark = separator.encode()
    line, rest = 1, b""
    while chunk := stream.read(_CHUNK_BYTES):
        *pieces, rest = (rest + chunk).split(mark)
        for piece in pieces:
            yield line, piece
            line += piece.count(b"\n") + mark.count(b"\n")
    yield line, rest


def _read_jsonl(file: SourceFile, text_field: str) -> Iterator[Document]:
    with file.path.open("rb") as stream:
        offset = 0
        for number, raw in enumerate(stream, start=1):
            if raw.strip():
                text = _text_of_json(_decode(raw, file.path, line=number, offset=offset), text_field, file.path, number)
                yield Document(text, len(raw))
            offset += len(raw)


def _text_of_json(line: str, text_field: str, path: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, line {number}: not valid JSON ({error}); correct or remove the line") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}, line {number}: a JSON object is needed, this is {type(record).__name__}")
    if text_field not in record:
        raise DataError(
            f"{path}, line {number}: no field {text_field!r}, only {', '.join(map(repr, record)) or 'none'}; "
            "set the source's text_field to the one that holds the text"
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(
            f"{path}, line {number}: field {text_field!r} holds {type(text).__name__}, not text; "
            "correct or remove the line"
        )
    if not _is_unicode(text):
        raise DataError(
            f"{path}, line {number}: field {text_field!r} holds half of a surrogate pair, which is no text; "
            "correct or remove the line"
        )
    return text


def _is_unicode(text: str) -> bool:
    """Tell whether a text can be encoded; JSON may write half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(file: SourceFile, text_field: str) -> Iterator[Document]:
    # Here, because pyarrow takes long to import and most jobs have no Parquet file.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file.path) as table:
            _check_parquet_column(table.schema_arrow, text_field, file.path)
            bytes_per_row = file.num_bytes / max(table.metadata.num_rows, 1)
            row = 0
            for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if text is None:
                        raise DataError(
                            f"{file.path}, row {row}: column {text_field!r} is null; fill or remove the row"
                        )
                    yield Document(text, bytes_per_row)
    except (pyarrow.ArrowInvalid, UnicodeDecodeError) as error:
        raise DataError(f"{file.path}: not a whole Parquet file of UTF-8 text ({error}); write it anew") from error


def _check_parquet_column(schema: pyarrow.Schema, text_field: str, path: Path) -> None:
    import pyarrow.types

    names: list[str] = schema.names
    if text_field not in names:
        raise DataError(
            f"{path}: no column {text_field!r}, only {', '.join(map(repr, names)) or 'none'}; "
            "set the source's text_field to the one that holds the text"
        )
    column_type = schema.field(text_field).type
    if not (pyarrow.types.is_string(column_type) or pyarrow.types.is_large_string(column_type)):
        raise DataError(f"{path}: column {text_field!r} holds {column_type}, not strings; name another as text_field")


def _decode(raw: bytes, path: Path, *, line: int, offset: int) -> str:
    # Some editors begin a file with the byte order mark of UTF-16, which says nothing in UTF-8.
    if offset == 0 and raw.startswith(codecs.BOM_UTF8):
        offset = len(codecs.BOM_UTF8)
        raw = raw[offset:]
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        bad_line = line + raw.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {bad_line}, byte offset {offset + error.start}: byte 0x{raw[error.start]:02x} is not UTF-8; "
            "convert the file, e.g. with iconv -f latin1 -t utf-8"
        ) from error
