"""From a run to Hugging Face's format and on to another run, and offline between a checkpoint and that format."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.convert_checkpoint import main as convert
from tests.end_to_end.launch import TINY_MODEL, losses, train
from tests.hugging_face_models import load_model, stored_tensors
from torchtrain.checkpoint import layout
from torchtrain.train import main


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that exported its model."""
    folder = tmp_path_factory.mktemp("finished")
    codes, said = train(folder, "training.steps=8", "checkpoint.export_hf=true", world_size=2)
    assert codes == [0, 0], said
    assert str(folder / "run" / "hugging_face") in said
    return folder


def test_a_run_starts_from_what_another_exported_and_alike_from_a_checkpoint_made_of_it(
    finished: Path, tmp_path: Path
) -> None:
    exported, job = finished / "run" / "hugging_face", finished / "run" / "job.yaml"
    assert next(load_model(exported).parameters()).dtype == torch.float32
    codes, said = train(tmp_path, f"model.hf_path={exported}")
    assert codes == [0], said
    assert "21 parameters loaded, 0 initialised, 0 unused" in said
    assert losses(tmp_path)[0] < losses(finished)[0] - 0.5
    made = tmp_path / "made" / "step_00000000"
    assert convert(["from-hf", str(exported), str(made), "--job", str(job)]) == 0
    (tmp_path / "again").mkdir()
    codes, said = train(tmp_path / "again", f"checkpoint.resume={made}")
    assert codes == [0], said
    assert losses(tmp_path / "again") == losses(tmp_path)


def test_offline_conversion_gives_what_the_run_exported_and_goes_back_bit_for_bit(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    exported = finished / "run" / "hugging_face"
    checkpoint = finished / "run" / "checkpoints" / "step_00000008"
    assert convert(["to-hf", str(checkpoint), str(tmp_path / "hf")]) == 0
    assert re.fullmatch(rf"{tmp_path / 'hf'}: 21 tensors, 0\.\d MiB in 1 file\(s\) for .*\n", capsys.readouterr().out)
    first, second = ({file.name: file.read_bytes() for file in at.iterdir()} for at in (exported, tmp_path / "hf"))
    assert first == second
    assert json.loads(first["config.json"])["eos_token_id"] == 257
    first = stored_tensors(exported)
    back = tmp_path / "run" / "checkpoints" / "step_00000000"
    job = finished / "run" / "job.yaml"
    being_saved = back.with_name("step_00000007.partial")
    being_saved.mkdir(parents=True)
    assert convert(["from-hf", str(tmp_path / "hf"), str(back), "--job", str(job)]) == 0
    assert layout.find_damage(back) is None
    assert being_saved.is_dir()
    shutil.copy(job, tmp_path / "run" / "job.yaml")
    assert convert(["to-hf", str(back), str(tmp_path / "again"), "--dtype", "bfloat16", "--max-file-gb", "1e-5"]) == 0
    again = stored_tensors(tmp_path / "again")
    assert all(torch.equal(again[name], first[name].bfloat16()) for name in first)
    assert convert(["from-hf", str(tmp_path / "hf"), str(tmp_path / "model"), "--job", str(job)]) == 2
    assert "must be named as a checkpoint is" in capsys.readouterr().err
    assert not [warning for warning in recwarn if "torch.distributed is disabled" in str(warning.message)]


def test_a_checkpoint_to_convert_is_named_as_the_user_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost, jobless = tmp_path / "nosuch", tmp_path / "mine" / "step_00000000"
    jobless.mkdir(parents=True)
    assert convert(["to-hf", str(lost), str(tmp_path / "hf")]) == 2
    assert f"source = '{lost}': must be a checkpoint of a run: there is no such folder" in capsys.readouterr().err
    assert convert(["to-hf", str(jobless), str(tmp_path / "hf")]) == 2
    assert f"keeps its job in {tmp_path / 'job.yaml'}: there is no such file; give --job" in capsys.readouterr().err


def test_a_resumed_run_needs_no_weights_but_those_of_its_checkpoint(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(finished / "run" / "hugging_face", folder)
    words = (f"model.hf_path={folder}", "checkpoint.interval=2", "checkpoint.export_hf=true")
    codes, said = train(tmp_path, *words)
    assert codes == [0], said
    unbroken, exported = losses(tmp_path), tmp_path / "run" / "hugging_face"
    expected = stored_tensors(exported)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
    shutil.rmtree(exported)
    shutil.rmtree(folder)
    codes, said = train(tmp_path, *words, "checkpoint.resume=auto")
    assert codes == [0], said
    assert f"{folder} is not read" in said
    assert losses(tmp_path) == unbroken
    resumed = stored_tensors(exported)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    # Nothing to go on with, and nothing to start from.
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    codes, said = train(tmp_path, *words, "checkpoint.resume=auto")
    assert codes == [2]
    assert f"model.hf_path = '{folder}': must be a folder" in said


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("config", "model.overrides.rope_theta = 10000.0: must be 5.0, as in"),
        ("truncated", "bytes': must be a whole safetensors file: it is cut short or none"),
        ("missing", "there is no such file or folder"),
    ],
)
def test_foreign_or_broken_weights_end_the_run_before_it_begins(
    finished: Path, tmp_path: Path, fault: str, complaint: str
) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(finished / "run" / "hugging_face", folder)
    if fault == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_theta": 5.0}}))
    elif fault == "truncated":
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-4])
    else:
        shutil.rmtree(folder)
    codes, said = train(tmp_path, f"model.hf_path={folder}")
    assert codes == [2]
    assert complaint in said
    assert not (tmp_path / "run").exists()


NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"


def spoil(folder: Path, fault: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if fault == "dtype":
        tensors[UP] = tensors[UP].to(torch.int8)
    elif fault == "unknown tensor":
        tensors["model.layers.7.mlp.up_proj.weight"] = tensors[UP].clone()
    elif fault == "missing tensor":
        del tensors[NORM]
    elif fault == "shape":
        tensors[UP] = tensors[UP][1:].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    if fault == "truncated file":
        file.write_bytes(file.read_bytes()[:-4])
    elif fault == "missing shard":
        weight_map = {name: "second.safetensors" if name == NORM else file.name for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("fault", "complaints"),
    [
        ("dtype", [f"{UP} = 'I8': must be F64, F32, F16, BF16; use weights that are not quantised"]),
        (
            "truncated file",
            ["model.safetensors = '", "must be a whole safetensors file: it is cut short", "; fetch it again"],
        ),
        ("missing shard", ["second.safetensors = null: must be there: ", "says it holds 1 tensors; fetch it"]),
        (
            "unknown tensor",
            ["model.layers.7.mlp.up_proj.weight = 'F32 [24, 16]': is no part of the model; set model.ov"],
        ),
        ("missing tensor", [f"{NORM} = null: must be on disk: norm.weight of the model is made of it; use"]),
        ("shape", [f"{UP} = [23, 16]: must be of shape [24, 16]; set model.overrides to the sizes"]),
    ],
)
def test_each_way_in_which_weights_can_be_wrong_is_named_with_the_way_out(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, complaints: list[str]
) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(finished / "run" / "hugging_face", folder)
    spoil(folder, fault)
    words = (f"model.overrides={TINY_MODEL}", f"model.hf_path={folder}", "accelerator.device=cpu")
    words += ("dataset.sources=[{path: unread}]", "training.seq_len=32", "training.global_batch_size=8")
    assert main([f"--{word}" for word in words]) == 2
    said = capsys.readouterr().err
    assert all(complaint in said for complaint in complaints), said
    assert f"{folder}/" in said or f"{folder}:" in said
    assert "Traceback" not in said


def test_an_export_in_fp32_holds_the_main_parameters_and_not_their_rounding(tmp_path: Path) -> None:
    words = (
        "model.init_dtype=bfloat16",
        "optimizer.fp32_main_params=true",
        "fsdp_config.mix_precision.fp32_main_grad=true",
        "fsdp_config.mix_precision.reduce_dtype=float32",
        "checkpoint.export_hf=true",
        "checkpoint.export_dtype=float32",
    )
    codes, said = train(tmp_path, *words, "fsdp_config.dp_shard_size=2", world_size=2)
    assert codes == [0, 0], said
    exported = stored_tensors(tmp_path / "run" / "hugging_face")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000004"
    assert convert(["to-hf", str(checkpoint), str(tmp_path / "stored")]) == 0
    assert convert(["to-hf", str(checkpoint), str(tmp_path / "mains"), "--dtype", "float32"]) == 0
    stored, mains = stored_tensors(tmp_path / "stored"), stored_tensors(tmp_path / "mains")
    for name, weight in exported.items():
        assert weight.dtype == torch.float32
        assert stored[name].dtype == torch.bfloat16
        assert not torch.equal(weight, stored[name].float()), name
        assert torch.equal(weight.bfloat16(), stored[name]), name
        assert torch.equal(weight, mains[name]), name
