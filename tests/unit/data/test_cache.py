from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from torchtrain.config.data import SourceConfig, TokenizerConfig
from torchtrain.data import cache
from torchtrain.data.cache import TokenCache, is_whole, load_or_build_cache
from torchtrain.data.tokenizer import BytesTokenizer
from torchtrain.errors import DataError

# A process that builds the cache of a source slowly, a document at a time, and says when it begins and ends.
SLOW_BUILD = """
import sys, time
from pathlib import Path
from torchtrain.config.data import SourceConfig, TokenizerConfig
from torchtrain.data import cache
from torchtrain.data.tokenizer import BytesTokenizer

class SlowTokenizer(BytesTokenizer):
    def encode_batch(self, texts):
        print("encoding", flush=True)
        time.sleep(float(sys.argv[3]))
        return super().encode_batch(texts)

cache._BATCH_CHARACTERS = 1
built = cache.load_or_build_cache(
    SourceConfig(path=sys.argv[1]), name="s", tokenizer=SlowTokenizer(), tokenizer_config=TokenizerConfig(),
    cache_dir=Path(sys.argv[2]), show_progress=False,
)
print(bytes(built.tokens[:].astype("uint8")).count(b"x"), flush=True)
"""


def build(source: SourceConfig, cache_dir: Path, *, show_progress: bool = False, **options: bool) -> TokenCache:
    return load_or_build_cache(
        source,
        name="s",
        tokenizer=BytesTokenizer(),
        tokenizer_config=TokenizerConfig(**options),
        cache_dir=cache_dir,
        show_progress=show_progress,
    )


def start_slow_build(source: SourceConfig, cache_dir: Path, *, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW_BUILD, source.path, str(cache_dir), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def folders_in(cache_dir: Path) -> list[Path]:
    return [path for path in cache_dir.iterdir() if path.is_dir()]


def test_tokens_and_offsets_are_the_documents(tmp_path: Path, write_jsonl: Callable[..., SourceConfig]) -> None:
    cache = build(write_jsonl("a", ["ab", "c", "déf"]), tmp_path / "cache")
    documents = [cache.tokens[a:b].tolist() for a, b in zip(cache.offsets[:-1], cache.offsets[1:], strict=True)]
    assert documents == [[256, *text.encode(), 257] for text in ("ab", "c", "déf")]
    assert cache.tokens.dtype == np.uint16
    assert (cache.header.num_tokens, cache.header.num_documents, cache.header.max_token_id) == (13, 3, 257)


def test_bos_and_eos_can_be_left_out(tmp_path: Path, write_jsonl: Callable[..., SourceConfig]) -> None:
    cache = build(write_jsonl("a", ["ab", "c"]), tmp_path / "cache", add_bos=False, add_eos=False)
    assert bytes(cache.tokens.tolist()) == b"abc"


def test_second_call_maps_the_first_ones_files(tmp_path: Path, write_jsonl: Callable[..., SourceConfig]) -> None:
    source = write_jsonl("a", ["ab"])
    first = build(source, tmp_path / "cache")
    written = (first.folder / "tokens.bin").stat().st_mtime_ns
    second = build(source, tmp_path / "cache")
    assert second.folder == first.folder
    assert (second.folder / "tokens.bin").stat().st_mtime_ns == written


def test_whatever_changes_tokens_gives_another_cache(tmp_path: Path, write_jsonl: Callable[..., SourceConfig]) -> None:
    source = write_jsonl("a", ["ab"])
    first = build(source, tmp_path / "cache")
    assert build(source, tmp_path / "cache", add_bos=False).folder != first.folder
    Path(source.path).write_text('{"text": "cd"}\n')
    os.utime(source.path, ns=(1, 1))  # same size; a later time would do as well
    changed = build(source, tmp_path / "cache")
    assert changed.folder != first.folder
    assert bytes(changed.tokens[1:3].tolist()) == b"cd"
    assert bytes(first.tokens[1:3].tolist()) == b"ab"  # whoever trains from the old one keeps it


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "header.json"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_damaged_cache_is_written_anew(
    tmp_path: Path, write_jsonl: Callable[..., SourceConfig], name: str, damage: str
) -> None:
    source = write_jsonl("a", ["ab", "cd"])
    cache = build(source, tmp_path / "cache")
    expected = cache.tokens.tolist()
    file = cache.folder / name
    if damage == "truncated":
        os.truncate(file, file.stat().st_size - 2)
    else:
        file.unlink()
    assert not is_whole(cache.folder)
    again = build(source, tmp_path / "cache")
    assert again.tokens.tolist() == expected
    assert is_whole(again.folder)


def test_two_processes_build_one_cache(tmp_path: Path, write_jsonl: Callable[..., SourceConfig]) -> None:
    source = write_jsonl("a", ["x"] * 4)
    processes = [start_slow_build(source, tmp_path / "cache", seconds=0.3) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert sorted(outputs) == [["4"], ["encoding"] * 4 + ["4"]]
    assert len(folders_in(tmp_path / "cache")) == 1


def test_nodes_without_a_common_lock_build_one_cache(
    tmp_path: Path, write_jsonl: Callable[..., SourceConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache_dir = write_jsonl("a", ["x"] * 4), tmp_path / "cache"
    other = start_slow_build(source, cache_dir, seconds=0.3)
    assert other.stdout is not None
    other.stdout.readline()
    # This process stands for another node: a host of another name, to which the lock means nothing.
    monkeypatch.setattr(cache, "host_name", lambda: "elsewhere")
    monkeypatch.setattr(cache, "_hold_lock", lambda *_: nullcontext())
    built = build(source, cache_dir)
    assert other.communicate(timeout=60)[0].split() == ["encoding"] * 3 + ["4"]
    assert folders_in(cache_dir) == [built.folder]
    assert is_whole(built.folder)


def test_killed_writer_leaves_nothing_that_the_next_one_minds(
    tmp_path: Path, write_jsonl: Callable[..., SourceConfig]
) -> None:
    source, cache_dir = write_jsonl("a", ["x"] * 50), tmp_path / "cache"
    process = start_slow_build(source, cache_dir, seconds=0.1)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    (partial,) = folders_in(cache_dir)
    assert not is_whole(partial)
    cache = build(source, cache_dir)
    assert cache.header.num_documents == 50
    assert folders_in(cache_dir) == [cache.folder]


def test_waiting_process_takes_over_from_a_killed_one(tmp_path: Path, write_jsonl: Callable[..., SourceConfig]) -> None:
    source, cache_dir = write_jsonl("a", ["x"] * 3), tmp_path / "cache"
    first = start_slow_build(source, cache_dir, seconds=60)
    assert first.stdout is not None
    first.stdout.readline()
    second = start_slow_build(source, cache_dir, seconds=0)
    time.sleep(0.5)
    first.kill()
    assert second.communicate(timeout=60)[0].split() == ["encoding"] * 3 + ["3"]
    first.wait(timeout=10)


def test_failed_build_leaves_no_cache(tmp_path: Path, write_jsonl: Callable[..., SourceConfig]) -> None:
    source = write_jsonl("a", ["ab"])
    with Path(source.path).open("a") as stream:
        stream.write("{broken\n")
    with pytest.raises(DataError, match="line 2"):
        build(source, tmp_path / "cache")
    assert folders_in(tmp_path / "cache") == []


@pytest.mark.parametrize("texts", [[], ["", "  \n"]])
def test_empty_corpus_is_refused(tmp_path: Path, write_jsonl: Callable[..., SourceConfig], texts: list[str]) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: the source holds no text"):
        build(write_jsonl("a", texts), tmp_path / "cache")


def test_unwritable_cache_folder_is_named(tmp_path: Path, write_jsonl: Callable[..., SourceConfig]) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(DataError, match=r"cache: cannot write the token cache .*; set dataset\.cache_dir"):
        build(write_jsonl("a", ["ab"]), tmp_path / "cache")


def test_cache_travels_to_a_worker_as_a_path(tmp_path: Path, write_jsonl: Callable[..., SourceConfig]) -> None:
    cache = build(write_jsonl("a", ["ab" * 100_000]), tmp_path / "cache")
    message = pickle.dumps(cache)
    assert len(message) < 1000
    assert pickle.loads(message).tokens.tolist() == cache.tokens.tolist()


@pytest.mark.parametrize("show_progress", [True, False])
def test_only_who_is_told_to_shows_a_bar(
    tmp_path: Path,
    write_jsonl: Callable[..., SourceConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    show_progress: bool,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich take the captured stream for a terminal
    build(write_jsonl("a", ["ab"]), tmp_path / "cache", show_progress=show_progress)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("tokenising" in captured.err) == show_progress


def test_no_bar_where_there_is_no_terminal(
    tmp_path: Path, write_jsonl: Callable[..., SourceConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    build(write_jsonl("a", ["ab"]), tmp_path / "cache", show_progress=True)
    assert capsys.readouterr().err == ""
