"""What the two commands answer before any job is read."""

from __future__ import annotations

import pytest

from torchtrain import train
from torchtrain.__main__ import main


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["job.yaml", "--help"]])
def test_help_shows_the_usage_and_the_way_to_the_reference(capsys, words):
    assert train.main(words) == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: python -m torchtrain.train JOB.yaml")
    assert "docs/config_reference.md" in said.out
    assert said.err == ""


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_world_that_is_no_number_of_ranks_is_refused(capsys, text):
    with pytest.raises(SystemExit) as ended:
        main(["config", f"--world-size={text}", "train_configs/llama/debug.yaml"])
    assert ended.value.code == 2
    assert f"'{text}' must be a whole number of ranks, at least 1" in capsys.readouterr().err
