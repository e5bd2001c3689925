from __future__ import annotations

import subprocess
import sys

import pytest

from torchtrain.config.job import Job
from torchtrain.config.load import collect_faults, load_job, read_job
from torchtrain.config.overrides import find_override_warnings
from torchtrain.errors import ConfigError, Fault

MINIMAL = "dataset: {sources: [{path: corpus}]}\n"


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "job.yaml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write_file


def faults_of(path=None, overrides=()) -> dict[str, str]:
    """The faults of a job by path, each as the user reads it."""
    return {fault.path: str(fault) for fault in read_job(path, overrides).faults}


def message_of(path, overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_job(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_minimal_file_resolves_to_complete_defaults(write):
    job = load_job(write(MINIMAL))
    assert job.fsdp_config == Job().fsdp_config
    assert job.fsdp_config.mix_precision.cast_forward_inputs is True
    assert job.dataset.sources[0].weight == 1.0


def test_toml_and_yaml_give_the_same_job(write):
    yaml = write("training: {steps: 7}\noptimizer: {_target_: torch.optim.SGD, lr: 1e-2}\n" + MINIMAL)
    toml = write(
        '[training]\nsteps = 7\n[optimizer]\n_target_ = "torch.optim.SGD"\nlr = 1e-2\n'
        '[[dataset.sources]]\npath = "corpus"\n',
        "job.toml",
    )
    assert load_job(yaml) == load_job(toml)


def test_yaml_1_2_reads_numbers_and_words_as_written(write):
    job = load_job(write("optimizer: {lr: 1e-4}\ntask: {sample_prompt: yes}\ntraining: {steps: 010}\n" + MINIMAL))
    assert (job.optimizer.lr, job.task.sample_prompt, job.training.steps) == (1e-4, "yes", 10)


def test_integer_is_taken_for_a_number():
    assert read_job(None, ["optimizer.weight_decay=0"]).job.optimizer.weight_decay == 0.0


@pytest.mark.parametrize(
    ("override", "path", "said"),
    [
        ("training.steps='5'", "training.steps", "= '5': must be a whole number; write 5 without quotes"),
        ("training.steps=5.0", "training.steps", "must be a whole number; write 5"),
        ("training.steps=true", "training.steps", "must be a whole number"),
        ("training.steps=null", "training.steps", "= null: must be a whole number; write one, such as the default 100"),
        ("optimizer.lr=true", "optimizer.lr", "must be a number"),
        ("optimizer.lr='1e-3'", "optimizer.lr", "must be a number; write 1e-3 without quotes"),
        ("optimizer.lr=.inf", "optimizer.lr", "must be a finite number"),
        ("training.max_grad_norm=big", "training.max_grad_norm", "must be a number or null"),
        ("compile.enabled=1", "compile.enabled", "must be true or false"),
        ("compile.enabled=yes", "compile.enabled", "must be true or false"),
        ("training.output_dir=3", "training.output_dir", 'must be text; quote it: "3" in the file'),
        ("task.sample_prompt=To be: or not", "task.sample_prompt", "a colon and a space make a mapping"),
        ("metrics.console=Rich", "metrics.console", 'must be one of auto, plain, rich; did you mean "rich"?'),
        ("fsdp_config.mix_precision.param_dtype=bf16", "fsdp_config.mix_precision.param_dtype", '"bfloat16"?'),
        ("model.init_dtype=3", "model.init_dtype", "use for example float16"),
        ("kernel_config.chunk_size=65", "kernel_config.chunk_size", "must be one of 16, 32, 64; use 64"),
        ("kernel_config.chunk_size=48", "kernel_config.chunk_size", "must be one of 16, 32, 64; use 32 or 64"),
        ("optimizer.betas=[0.9]", "optimizer.betas", "has too few elements"),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas", "has too many elements"),
        ("optimizer.betas=0.9", "optimizer.betas", "must be a list; write it in brackets"),
        ("checkpoint.resume=true", "checkpoint.resume", "must be text or null; write auto"),
        ("checkpoint.resume=false", "checkpoint.resume", "must be text or null; write null"),
        ("optimizer._target_=3", "optimizer._target_", "must be text"),
        ("model.overrides=3", "model.overrides", "must be a mapping"),
        ("training=3", "training", "must be a mapping of keys to values; write its keys below it, or leave it out"),
        ("dataset.sources=[{weight: 2}]", "dataset.sources.0.path", "= null: is required; add it"),
        ("dataset.sources=[{path: a}, {path: 3}]", "dataset.sources.1.path", "must be text"),
    ],
)
def test_wrong_type_is_refused_and_explained(override, path, said):
    faults = faults_of(None, [override])
    assert list(faults) == [path]
    assert said in faults[path]


@pytest.mark.parametrize(
    ("override", "guess"),
    [
        ("training.stepz=4", "did you mean training.steps?"),
        ("dp_shard_size=4", "did you mean fsdp_config.dp_shard_size?"),
        ("training.dp_shard_size=4", "did you mean fsdp_config.dp_shard_size?"),
        ("fsdp_config.tp_size=2", "did you mean accelerator.tp_size?"),
        ("optimiser.lr=1", "did you mean optimizer?"),
        ("optimizer.target=torch.optim.SGD", "did you mean optimizer._target_?"),
        ("fsdp_config.mix_precision.paramdtype=float32", "did you mean fsdp_config.mix_precision.param_dtype?"),
        ("checkpoint.keep=2", "did you mean checkpoint.keep_last?"),
        ("dataset.sources=[{path: a, wieght: 2}]", "did you mean dataset.sources.0.weight?"),
        ("zzz=1", "docs/config_reference.md lists every key"),
    ],
)
def test_unknown_key_fails_with_its_path_and_the_nearest_name(override, guess):
    ((_, said),) = faults_of(None, [override]).items()
    assert "is not a key of the job" in said
    assert guess in said


@pytest.mark.parametrize(
    ("override", "why", "instead"),
    [
        ("fsdp_config.enabled=true", "FSDP is on where the topology has an FSDP domain", "fsdp_config.dp_shard_size"),
        ("fsdp_config.dp_replicate_size=2", "derived from the world size", "fsdp_config.dp_shard_size"),
        ("dp_replicate_size=2", "derived from the world size", "fsdp_config.dp_shard_size"),
        ("fsdp_config.wrap_policy=x", "every transformer block is a unit", "remove it"),
        ("dist_config.tp_size=2", "public topology", "write accelerator.tp_size"),
        ("dist_config.cp_size=2", "public topology", "write accelerator.cp_size"),
        ("dist_config.cp_mode=ring", "public topology", "write accelerator.cp_mode"),
        ("dist_config.dp_size=2", "public topology", "remove it"),
        ("dist_config.mp_shard_size=2", "public topology", "write fsdp_config.dp_shard_size"),
        ("dist_config.mp_replicate_size=2", "public topology", "fsdp_config.dp_shard_size"),
        ("dist_config.dist_timeout=60", "public topology", "write accelerator.dist_timeout_s"),
        ("dist_config.ep_modules=[a]", "decided by the model family", "remove it"),
        ("dist_config.ep_fsdp_modules=[a]", "decided by the model family", "remove it"),
        ("extends=base.yaml", "read from a job file", "at the top of the file"),
        ("bf16=true", "mixes storage and compute dtype", "model.init_dtype"),
        ("learning_rate=1e-3", "another trainer's word", "optimizer.lr"),
        ("training.gradient_accumulation_steps=2", "is derived", "training.global_batch_size"),
    ],
)
def test_removed_key_fails_with_its_own_explanation(override, why, instead):
    ((path, said),) = faults_of(None, [override]).items()
    assert path == override.partition("=")[0]
    assert why in said
    assert instead in said


def test_all_faults_are_listed_at_once_with_those_of_the_rules(write):
    path = write("training: {steps: many, seq_len: 0}\nfsdp_config: {dp_shard_size: 0}\nfoo: 1\n" + MINIMAL)
    said = message_of(path, ["optimizer.lr=-1"])
    for part in ("5 faults", "training.steps", "training.seq_len", "fsdp_config.dp_shard_size", "foo", "optimizer.lr"):
        assert part in said


def test_unreadable_value_is_replaced_by_its_default(write):
    reading = read_job(write("training: {steps: many, seq_len: 64}\n" + MINIMAL))
    assert (reading.job.training.steps, reading.job.training.seq_len) == (100, 64)


def test_default_standing_in_for_an_unreadable_value_causes_no_second_fault(write):
    said = message_of(write("training: {global_batch_size: '64', micro_batch_size: 16}\ndataset: {sources: 3}\n"))
    assert "2 faults" in said


def test_a_fault_found_twice_is_listed_once_whatever_its_value():
    fault = Fault("dataset.sources", [], "must not be empty", "add one")
    assert collect_faults(read_job(None), [fault], [fault]) == [fault]


@pytest.mark.parametrize(
    "words",
    [
        ["--training.steps=7"],
        ["--training.steps", "7"],
        ["training.steps=7"],
        ["training.steps", "7"],
        ["--training={steps: 7}"],
        ["--training.steps=1", "--training.steps=7"],
    ],
)
def test_override_forms(write, words):
    assert load_job(write(MINIMAL), words).training.steps == 7


def test_overrides_are_applied_before_validation(write):
    path = write("training: {global_batch_size: 8, micro_batch_size: 4}\n" + MINIMAL)
    job = load_job(path, ["--training.micro_batch_size=3", "--training.global_batch_size=9"])
    assert job.training.micro_batch_size == 3


def test_override_values_are_yaml(write):
    job = load_job(
        write(MINIMAL),
        [
            "--dataset.sources=[{path: a, weight: 2}, {path: b}]",
            "--dataset.sources.1.weight=3",
            "--training.max_grad_norm=null",
            "--optimizer._target_=torch.optim.SGD",
            "--optimizer.weight_decay",
            "0",
            '--task.sample_prompt="a: b=c"',
            "--model.overrides.hidden_size=64",
        ],
    )
    assert [source.weight for source in job.dataset.sources] == [2.0, 3.0]
    assert job.training.max_grad_norm is None
    assert job.optimizer.target == "torch.optim.SGD"
    assert job.task.sample_prompt == "a: b=c"
    assert job.model.overrides == {"hidden_size": 64}


def test_negative_number_is_a_value_not_a_key():
    assert read_job(None, ["--training.seed", "-1"]).job.training.seed == -1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--compile.enabled"], "has no value; write it as --compile.enabled=VALUE"),
        (["--compile.enabled", "--training.steps=3"], "has no value"),
        (["training.steps="], "has an empty value"),
        (["--=3"], "is not a dotted job key"),
        (["a..b=3"], "is not a dotted job key"),
        (["training.output_dir=[x"], "must be a YAML value"),
        (["training.steps.x=3"], "must be a whole number"),
        (["dataset.sources=[{path: a}]", "dataset.sources.4={path: b}"], "must name an element from 0 to 0"),
        (["training=3", "training.steps=4"], "training has no keys"),
    ],
)
def test_word_that_is_no_override_is_refused(words, said):
    assert said in "\n".join(faults_of(None, words).values())


def test_override_of_an_anchored_node_leaves_its_alias_alone(write):
    path = write("dataset: {sources: [&s {path: a}, {path: b}]}\nmodel: {overrides: {x: &n {k: 1}, y: *n}}\n")
    assert load_job(path, ["model.overrides.x.k=2"]).model.overrides == {"x": {"k": 2}, "y": {"k": 1}}


def test_extends_merges_mappings_and_replaces_lists(write, tmp_path):
    write("training: {steps: 1, seq_len: 32}\noptimizer: {betas: [0.8, 0.9]}\n" + MINIMAL, "base.yaml")
    (tmp_path / "sub").mkdir()
    write('extends = "../base.yaml"\n[training]\nsteps = 2\n', "sub/middle.toml")
    path = write("extends: sub/middle.toml\noptimizer: {betas: [0.5, 0.6]}\n")
    job = load_job(path)
    assert (job.training.steps, job.training.seq_len, job.optimizer.betas) == (2, 32, (0.5, 0.6))


def test_extends_cycle_is_refused_with_its_chain(write):
    write("extends: job.yaml\n", "base.yaml")
    said = message_of(write("extends: base.yaml\n"))
    assert "must not lead back to itself" in said
    assert said.count("job.yaml") >= 2


def test_missing_base_names_who_asked_for_it(write):
    write(MINIMAL, "base.yaml")
    said = message_of(write("extends: bases.yaml\n"))
    assert "extends in" in said
    assert "job.yaml" in said
    assert "base.yaml?" in said


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("job.yaml", "", "is empty; write at least dataset.sources"),
        ("job.yaml", "# nothing\n", "is empty"),
        ("job.toml", "", "is empty"),
        ("job.yaml", "- a\n", "must be a mapping of sections, not a list"),
        ("job.yaml", "a: [1\nb: 2", "job.yaml:2:2': is not valid YAML"),
        ("job.yaml", "training:\n  steps: 1\n  steps: 2\n", 'duplicate key "steps"'),
        ("job.yaml", "training:\n  steps: 1\n  steps: 2\n", "line 3, column 3; keep one of the two"),
        ("job.yaml", "training:\n\tsteps: 1\n", "line 2, column 1"),
        ("job.yaml", "a: &x [*x]\n", "Circular reference"),
        ("job.toml", "a = 1\na = 2\n", "is not valid TOML: Cannot overwrite a value (at line 2, column 6)"),
        ("job.json", "{}", "must be YAML or TOML"),
        ("job.yaml", "extends: 3\n", "must name one job file"),
        ("job.yaml", "extends:\n", "must name one job file"),
    ],
)
def test_unreadable_file_is_refused(write, name, text, said):
    assert said in message_of(write(text, name))


def test_missing_file_names_the_nearest_one(write, tmp_path):
    write(MINIMAL, "debug.yaml")
    said = message_of(tmp_path / "debgu.yaml")
    assert "does not exist" in said
    assert "debug.yaml?" in said


def test_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "job.yaml").write_bytes(b"\xff\xfe\x00")
    assert "give a readable UTF-8 text file" in message_of(tmp_path / "job.yaml")


def test_checking_a_job_imports_no_torch():
    modules = ["load", "dump", "rules", "availability", "reference"]
    imports = "; ".join(f"import torchtrain.config.{module}" for module in modules)
    code = f"{imports}; import torchtrain.distributed.topology; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_values_that_are_no_numbers_are_told_once_each():
    assert list(faults_of(None, ["optimizer.betas=[.nan, .nan]"])) == ["optimizer.betas.0", "optimizer.betas.1"]


def test_blank_text_on_the_command_line_is_to_be_quoted():
    path = "dataset.sources.0.document_separator"
    said = faults_of(None, ["dataset.sources=[{path: a}]", f"{path}=\n\n"])[path]
    assert said.endswith(f"""quote blanks and line ends inside the shell's quotes: --{path}='"\\n\\n"'""")


def test_a_key_with_several_values_on_the_command_line_is_named_with_the_one_that_counts():
    words = ["--training.steps=3", "training.seq_len=64", "--training.steps", "5", "training.seq_len=64"]
    assert find_override_warnings(words) == [
        "training.steps is given 3 and 5 on the command line: the last one counts, 5"
    ]
