"""The parity scripts: a family that agrees with its oracles, one that does not, and words that mean no topology."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from models.registry import FAMILIES, load_spec
from torchtrain.checkpoint.hf_export import LiveWeights, export_weights
from torchtrain.checkpoint.hf_side_files import SideFiles
from torchtrain.errors import ConfigError
from torchtrain.hugging_face.model_config import write_config
from torchtrain.nn.rope import RotaryTable
from torchtrain.nn.routing import BestScores
from torchtrain.testing.oracles import randomised
from torchtrain.testing.tolerances import BF16_TENSOR

SCRIPTS = Path(__file__).parents[3] / "scripts" / "parity"


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a family's script in this process; returns its exit code and what it printed."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(SCRIPTS)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(family: str, *words: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", [f"{family}.py", *words])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(SCRIPTS / f"{family}.py"), run_name="__main__")
        told = capsys.readouterr()
        return caught.value.code, told.out + told.err

    yield run
    torch.set_num_threads(num_threads)


def test_every_family_has_a_script():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {*FAMILIES, "compare", "replay"}


def test_without_hugging_face_a_script_says_in_a_line_what_to_install(run_script, monkeypatch):
    monkeypatch.delitem(sys.modules, "compare", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, told = run_script("qwen2")
    assert code == 2
    assert told == "error: transformers is not installed; run: .venv/bin/pip install -e '.[test]', or ./run_tests.sh\n"


def test_a_family_that_agrees_with_both_oracles_ends_with_0(run_script):
    code, told = run_script("qwen2", "--rows", "99")
    assert code == 0
    # Logits, loss and 26 gradients (one for tied weights), against two oracles.
    assert "56 compared" in told
    assert "0 over" in told
    assert "OVER" not in told


def export_small(family: str, folder: Path) -> None:
    """Write a drawn model of a script's sizes for Hugging Face."""
    small = runpy.run_path(str(SCRIPTS / f"{family}.py"))["SMALL"]
    spec = load_spec(family)
    torch.manual_seed(1)
    model = randomised(spec.build(small))
    side_files = SideFiles(write_config(small, spec.hugging_face.config, dtype="float32"), {})
    export_weights(LiveWeights(dict(model.named_parameters())), folder, spec.hugging_face.weights, side_files)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_we_export_agrees_with_both_oracles(run_script, tmp_path, family):
    export_small(family, tmp_path / "exported")
    code, told = run_script(family, "--hf", str(tmp_path / "exported"), "--rows", "3")
    assert (code, "0 over" in told) == (0, True), told


def test_a_folder_in_bf16_is_held_to_what_hugging_face_loses_with_the_same_choices(run_script, tmp_path):
    export_small("qwen3_moe", tmp_path / "exported")
    code, told = run_script("qwen3_moe", "--hf", str(tmp_path / "exported"), "--dtype", "bfloat16")
    assert (code, "0 over" in told) == (0, True), told
    found = re.search(r"own bf16 is away by: .* gradients up to ([\d.e-]+)", told)
    # With choices of its own it is away by many times that.
    assert found is not None
    assert float(found[1]) <= 2 * BF16_TENSOR


def test_weights_on_which_bf16_says_nothing_are_refused(run_script):
    compare = importlib.import_module("compare")
    tolerances, one = compare.TOLERANCES_OF_FOLDERS["bfloat16"], torch.ones(3)
    exact = compare.Results(one, 1.0, {"weight": one})
    widened = compare.widened_to(tolerances, compare.Results(one, 1.0, {"weight": 0.8 * one}), exact)
    assert (widened.logits, widened.loss) == (tolerances.logits, tolerances.loss)
    assert widened.gradient == pytest.approx(1.5 * 0.2)
    with pytest.raises(ConfigError, match=r"must say something of these weights"):
        compare.widened_to(tolerances, compare.Results(one, 1.0, {"weight": 0.4 * one}), exact)


def test_in_bf16_choices_of_experts_are_replayed_and_judged_by_what_they_give_away(run_script, monkeypatch):
    code, told = run_script("qwen3_moe", "--dtype", "bfloat16", "--rows", "1")
    assert (code, "0 over" in told) == (0, True), told
    assert told.count("replayed: choices of") == 2
    # The worst experts rather than the best: no rounding.
    monkeypatch.setattr(BestScores, "__call__", lambda self, scores_BTE, count: (-scores_BTE).topk(count).indices)
    code, told = run_script("qwen3_moe", "--dtype", "bfloat16", "--rows", "2")
    assert (code, "2 over" in told) == (1, True), told
    code, told = run_script("qwen3_moe", "--dtype", "bfloat16", "--topology", "fsdp2")
    assert code == 2
    assert "choices are replayed on one device only" in told


def test_a_planted_fault_is_shown_worst_first_and_ends_with_1(run_script, monkeypatch):
    monkeypatch.setattr(RotaryTable, "rotate", lambda self, x_BTNH: x_BTNH)
    code, told = run_script("qwen2")
    assert code == 1
    assert "OVER" in told
    errors = [float(found) for found in re.findall(r"│ ([\d.]+e[+-]\d\d) +│", told)]
    tolerances = [float(found) for found in re.findall(r"│ (\de-\d\d) +│", told)]
    multiples = [error / tolerance for error, tolerance in zip(errors, tolerances, strict=True)]
    assert len(multiples) == 20
    # As far as the printed digits tell.
    assert all(first > 0.98 * second for first, second in pairwise(multiples))


def test_ranks_of_a_topology_agree_too(run_script):
    code, told = run_script("llama", "--topology", "fsdp2", "--rows", "1")
    assert (code, "0 over" in told) == (0, True), told


@pytest.mark.parametrize("topology", ["fdsp2", "fsdp2xfsdp2", "tp0", "fsdp2tp2", ""])
def test_words_that_mean_no_topology_are_refused(run_script, topology):
    code, told = run_script("llama", "--topology", topology)
    assert code == 2
    assert "--topology" in told


def test_what_a_family_cannot_do_is_refused_before_anything_is_computed(run_script):
    code, told = run_script("qwen3_5_moe", "--topology", "fsdp2,tp2")
    assert code == 2
    assert "gated delta nets are not split" in told
    assert "compared" not in told
