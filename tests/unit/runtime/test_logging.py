import logging

import pytest

from torchtrain.errors import ConfigError
from torchtrain.runtime.logging import get_logger, setup_logging


@pytest.fixture(autouse=True)
def _restore_logging():
    yield
    setup_logging(0, None)
    logging.captureWarnings(False)
    root = logging.getLogger()
    for handler in [h for h in root.handlers if (h.name or "").startswith("torchtrain.")]:
        root.removeHandler(handler)


def test_rank_zero_prints_and_keeps_a_file(tmp_path, capsys):
    setup_logging(0, tmp_path)
    get_logger("torchtrain.trainer").info("step 1")
    get_logger("models.llama.spec").info("built")
    out = capsys.readouterr().out
    assert "step 1" in out
    assert "built" in out
    assert "torchtrain.trainer: step 1" in (tmp_path / "logs" / "rank_0.log").read_text()


def test_other_ranks_print_errors_only_but_keep_everything(tmp_path, capsys):
    setup_logging(3, tmp_path)
    get_logger("torchtrain.trainer").info("step 1")
    get_logger("torchtrain.trainer").error("lost a peer")
    out = capsys.readouterr().out
    assert "step 1" not in out
    assert "[rank 3]" in out
    assert "lost a peer" in out
    text = (tmp_path / "logs" / "rank_3.log").read_text()
    assert "step 1" in text
    assert "lost a peer" in text


def test_a_second_setup_replaces_the_first_and_appends(tmp_path, capsys):
    for text in ("first", "second"):
        setup_logging(0, tmp_path)
        get_logger("torchtrain").info(text)
    assert capsys.readouterr().out.count("second") == 1
    lines = (tmp_path / "logs" / "rank_0.log").read_text().splitlines()
    assert [line.rsplit(": ", 1)[-1] for line in lines] == ["first", "second"]


def test_libraries_are_heard_from_warning_on(capsys):
    setup_logging(0, None)
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("trouble")
    out = capsys.readouterr().out
    assert "chatter" not in out
    assert "trouble" in out


def test_a_folder_that_cannot_be_written_is_a_fault_of_the_job(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"training\.output_dir = .*file/run.*: must be a folder"):
        setup_logging(0, tmp_path / "file" / "run")
