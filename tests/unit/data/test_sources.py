from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from torchtrain.config.data import SourceConfig
from torchtrain.data import sources
from torchtrain.data.sources import list_files, read_documents
from torchtrain.errors import DataError


def read_texts(source: SourceConfig) -> list[str]:
    return [document.text for file in list_files(source) for document in read_documents(file, source)]


def test_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo é\n")
    assert read_texts(SourceConfig(path=str(tmp_path / "a.txt"))) == ["one\n\ntwo é\n"]


@pytest.mark.parametrize("chunk_bytes", [1, 3, 1 << 20])
def test_text_file_splits_at_the_separator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(sources, "_CHUNK_BYTES", chunk_bytes)
    (tmp_path / "a.txt").write_text("one<|>\n two é<|><|>  <|>three")
    source = SourceConfig(path=str(tmp_path / "a.txt"), document_separator="<|>")
    assert read_texts(source) == ["one", "\n two é", "three"]


def test_jsonl_reads_the_named_field_and_skips_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "two\\n", "id": 3}\n{"body": ""}')
    assert read_texts(SourceConfig(path=str(tmp_path / "a.jsonl"), text_field="body")) == ["one", "two\n"]


def test_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n', encoding="utf-8-sig")
    assert read_texts(SourceConfig(path=str(tmp_path))) == ["one", "two"]


def test_half_a_surrogate_pair_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n{"text": "\\ud800"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: field 'text' holds half of a surrogate pair"):
        read_texts(SourceConfig(path=str(tmp_path)))


@pytest.mark.parametrize("string_type", [pyarrow.string(), pyarrow.large_string()])
def test_parquet_reads_the_named_column(tmp_path: Path, string_type: pyarrow.DataType) -> None:
    texts = [f"text {i}" for i in range(2500)]
    table = pyarrow.table({"body": pyarrow.array(texts, string_type), "id": list(range(2500))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    assert read_texts(SourceConfig(path=str(tmp_path / "a.parquet"), text_field="body")) == texts


def test_folder_is_read_recursively_in_name_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/y.jsonl", "a.txt", ".hidden.txt", ".git/x.txt", "notes.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"text": name}) if name.endswith("jsonl") else name)
    assert read_texts(SourceConfig(path=str(tmp_path))) == ["a/y.jsonl", "a/z.txt", "a.txt", "b.txt"]


def test_format_overrides_the_suffix(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("pass")
    (tmp_path / "data.json").write_text('{"text": "x"}')
    assert read_texts(SourceConfig(path=str(tmp_path), format="text")) == ["pass", '{"text": "x"}']
    assert read_texts(SourceConfig(path=str(tmp_path / "data.json"), format="jsonl")) == ["x"]


def test_source_bytes_add_up_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "é"}\n{"text": "two"}\n')
    source = SourceConfig(path=str(tmp_path / "a.jsonl"))
    (file,) = list_files(source)
    assert sum(document.source_bytes for document in read_documents(file, source)) == file.num_bytes


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n\n{"text": "y"\n', r"a\.jsonl, line 3: not valid JSON .*; correct or remove"),
        ("a.jsonl", b'{"text": "x"}\n["y"]\n', r"a\.jsonl, line 2: a JSON object is needed, this is list"),
        ("a.jsonl", b'{"body": "x"}\n', r"a\.jsonl, line 1: no field 'text', only 'body'; set the source's text_field"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl, line 1: field 'text' holds int, not text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', r"line 2, byte offset 24: byte 0xe9 is not UTF-8; convert"),
        ("a.txt", b"one\ntwo \xff", r"a\.txt, line 2, byte offset 8: byte 0xff is not UTF-8"),
        ("a.parquet", b"not parquet", r"a\.parquet: not a whole Parquet file"),
        ("a.csv", b"x", r"a\.csv: the suffix '\.csv' says no format \(known: \.txt, .*\); rename .* or set"),
    ],
)
def test_bad_file_is_refused_with_its_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_texts(SourceConfig(path=str(tmp_path / name)))


def test_byte_offset_counts_from_the_file_not_the_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n--\ntwo\n--\nthree\nx\xff")
    with pytest.raises(DataError, match="line 6, byte offset 21"):
        read_texts(SourceConfig(path=str(tmp_path / "a.txt"), document_separator="--"))


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("body", ["x"], "no column 'text', only 'body'; set the source's text_field"),
        ("text", [1], "column 'text' holds int64, not strings"),
        ("text", ["x", None], "row 2: column 'text' is null"),
    ],
)
def test_bad_parquet_column_is_refused(tmp_path: Path, column: str, values: list[object], message: str) -> None:
    pyarrow.parquet.write_table(pyarrow.table({column: values}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        read_texts(SourceConfig(path=str(tmp_path / "a.parquet")))


def test_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lost: no such file or folder"):
        list_files(SourceConfig(path=str(tmp_path / "lost")))


def test_folder_without_a_readable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"")
    with pytest.raises(DataError, match="the folder has no file to read"):
        list_files(SourceConfig(path=str(tmp_path)))
