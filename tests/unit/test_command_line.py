"""What the two commands answer: about themselves, and what ``config`` says of a job."""

from __future__ import annotations

import pytest
from ruamel.yaml import YAML

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


def run_config(capsys, *words):
    code = main(["config", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("words")
    return f"--dataset.sources=[{{path: {path}}}]"


def test_config_prints_the_job_and_warns_beside_it(capsys, corpus):
    code, out, err = run_config(
        capsys, corpus, "--fsdp_config.replicate_params=['*norm.weight']", "--accelerator.device=cpu"
    )
    assert code == 0
    assert yaml_of(out)["fsdp_config"]["replicate_params"] == ["*norm.weight"]
    assert out.endswith("# kernels on cpu in float32: rms_norm: torch\n")
    assert err == ("warning: fsdp_config.replicate_params has no effect: it needs more than one data-parallel rank\n")


def yaml_of(text):
    return YAML(typ="safe", pure=True).load(text)


def test_config_says_what_the_model_and_the_disk_rule_out_beside_the_job(capsys, tmp_path):
    words = [f"--dataset.sources=[{{path: {tmp_path}/gone}}]", f"--checkpoint.resume={tmp_path}/step_00000007"]
    words += ["--optimizer.no_decay=['*bais']", "--fsdp_config.replicate_params=[nrm.weight]", "--world-size=2"]
    code, out, err = run_config(capsys, *words)
    assert code == 2
    assert yaml_of(out)["optimizer"]["no_decay"] == ["*bais"]
    assert "(2 faults):\n  1. optimizer.no_decay = '*bais'" in err
    assert "\n  2. fsdp_config.replicate_params = 'nrm.weight': must match a parameter of the model" in err
    assert f"error: {tmp_path}/gone: no such file or folder; correct the path in dataset.sources\n" in err
    assert f"error: {tmp_path}/step_00000007: there is no such folder" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("job", "ranks"),
    [("llama/debug", 1), ("llama/debug_tp2", 4), ("qwen3_moe/debug_ep4", 4)],
)
def test_a_job_is_checked_for_the_fewest_ranks_that_it_fits_unless_told(capsys, monkeypatch, job, ranks):
    job = f"train_configs/{job}.yaml"
    for name in ("NGPU", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    code, _, err = run_config(capsys, job)
    assert code == 0, err
    assert (f"note: checked for {ranks} ranks" in err) == (ranks > 1)
    assert "note" not in run_config(capsys, job, "--world-size=8")[2]
    monkeypatch.setenv("NGPU", "3")
    told = run_config(capsys, job)
    assert told == run_config(capsys, job, "--world-size=3")
    assert told[0] == 2


def test_on_too_few_ranks_a_job_is_told_first_how_many_it_wants(capsys):
    assert train.main(["train_configs/llama/debug_tp2.yaml"]) == 2
    said = capsys.readouterr().err
    assert "; start 4 ranks in all (on one machine: NGPU=4 ./run_train.sh), or set accelerator.tp_size to 1\n" in said


def test_what_the_model_cannot_do_is_listed_beside_what_the_ranks_cannot(capsys, corpus):
    words = [corpus, "--model.name=qwen3_5_moe", "--dist_config.name=fsdpturbo", "--accelerator.tp_size=2"]
    code, _, err = run_config(capsys, *words, "--world-size=2")
    assert code == 2
    assert "(2 faults)" in err
    assert "1. accelerator.tp_size = 2: must be 1 with dist_config.name" in err
    assert "2. accelerator.tp_size = 2: tensor parallel is not possible with qwen3_5_moe" in err


def test_ways_out_of_one_list_agree(capsys, corpus):
    words = [corpus, "--model.name=qwen3_moe", "--accelerator.ep_size=3", "--training.global_batch_size=16"]
    _, _, err = run_config(capsys, *words, "--world-size=6")
    assert "accelerator.ep_size = 3: must divide num_experts = 8, of which every rank gets as many; use 2\n" in err
    assert "training.global_batch_size = 16: must be" in err
    assert "start" not in err


@pytest.mark.parametrize("words", [[], ["--training.steps=5"]])
@pytest.mark.parametrize("start", [train.main, lambda words: main(["config", *words])])
def test_without_a_job_file_the_answer_is_how_to_name_one(capsys, start, words):
    assert start(words) == 2
    assert capsys.readouterr().err == (
        "error: the job is wrong (1 fault):\n"
        "  1. job file = null: must be named, since dataset.sources has no default; "
        "write it before any override, as in train_configs/llama/debug.yaml --training.steps=50\n"
    )


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["--training.global_batch_size=10", "--training.micro_batch_size=4"], "training.global_batch_size"),
        (["--model.name=qwen3_moe", "--accelerator.ep_size=3"], "accelerator.ep_size"),
    ],
)
def test_a_mistake_that_two_rules_see_is_listed_once(capsys, corpus, words, path):
    code, _, err = run_config(capsys, corpus, "--world-size=8", *words)
    assert code == 2
    assert f"(1 fault):\n  1. {path} = " in err


def test_of_a_wrong_batch_size_the_ranks_are_told_too(capsys, corpus):
    words = ["--world-size=8", "--training.global_batch_size=10", "--training.micro_batch_size=4"]
    assert (
        "must be a multiple of training.micro_batch_size x dp_size = 4 x 8 = 32"
        in run_config(capsys, corpus, *words)[2]
    )
