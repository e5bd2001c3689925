from __future__ import annotations

import pytest

from torchtrain.config.idle_settings import find_job_warnings
from torchtrain.config.load import read_job
from torchtrain.config.rules import find_job_faults, nearest_divisors, nearest_multiples

SOURCES = "dataset.sources=[{path: corpus}]"
PRECISION = "fsdp_config.mix_precision"
WSD = "lr_scheduler={name: wsd, warmup_steps: 50, decay_steps: 60}"
PLUGIN = "dist_config={name: fsdpturbo, ep_size: 4}"


def faults_of(*overrides: str) -> dict[str, str]:
    reading = read_job(None, [SOURCES, *overrides])
    assert reading.faults == ()
    return {fault.path: str(fault) for fault in find_job_faults(reading.job)}


def test_default_job_with_a_source_has_no_fault():
    assert faults_of() == {}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_precision_is_legal(dtype):
    assert faults_of(*(f"{PRECISION}.{key}_dtype={dtype}" for key in ("param", "reduce", "output"))) == {}


@pytest.mark.parametrize("path", [
    "training.steps", "training.seq_len", "training.global_batch_size", "training.micro_batch_size",
    "accelerator.tp_size", "accelerator.cp_size", "accelerator.ep_size", "accelerator.pp_size",
    "accelerator.pp_micro_batch_size", "fsdp_config.dp_shard_size", "fsdp_config.edp_shard_size",
    "activation_checkpoint.every_n_blocks", "task.eval_sequences", "metrics.log_interval", "profiling.trace_steps",
])  # fmt: skip
@pytest.mark.parametrize("value", [0, -2])
def test_size_below_one_is_refused(path, value):
    assert faults_of(f"{path}={value}") == {path: f"{path} = {value}: must be at least 1; use 1 or more"}


@pytest.mark.parametrize("path", [
    "fsdp_config.forward_prefetch_depth", "fsdp_config.backward_prefetch_depth", "training.seed",
    "training.gc_interval",
    "dataset.num_workers", "optimizer.weight_decay", "lr_scheduler.warmup_steps", "lr_scheduler.decay_steps",
    "task.eval_interval", "task.sample_tokens", "task.sample_temperature", "checkpoint.interval",
    "checkpoint.keep_last",
    "profiling.trace_interval", "profiling.memory_snapshot_interval",
])  # fmt: skip
def test_negative_count_is_refused(path):
    ((fault_path, said),) = faults_of(f"{path}=-1").items()
    assert fault_path == path
    assert "must be at least 0; use 0 or more" in said


@pytest.mark.parametrize("path", [
    "optimizer.lr", "optimizer.eps", "training.max_grad_norm", "accelerator.dist_timeout_s", "metrics.peak_flops",
])  # fmt: skip
def test_quantity_that_is_not_positive_is_refused(path):
    assert "must be above 0" in faults_of(f"{path}=0")[path]


@pytest.mark.parametrize(
    ("path", "value", "most"),
    [
        ("accelerator.dist_timeout_s", "1e15", 31622400),
        ("training.seed", str(2**64), 2**63 - 1),
        ("dataset.num_workers", "10000000000", 1024),
    ],
)
def test_what_no_machine_can_take_is_refused_with_the_bound(path, value, most):
    assert faults_of(f"{path}={value}")[path].endswith(f"must be at most {most}; use {most} or less")
    assert faults_of(f"{path}={most}") == {}


@pytest.mark.parametrize("path", ["training.output_dir", "model.preset", "tokenizer.path", "checkpoint.resume"])
def test_empty_text_is_refused(path):
    assert "must not be empty" in faults_of(f"{path}=''")[path]


@pytest.mark.parametrize(
    ("overrides", "path", "said"),
    [
        (
            ["training.global_batch_size=10", "training.micro_batch_size=4"],
            "training.global_batch_size",
            "must be a multiple of training.micro_batch_size = 4 (times the data-parallel ranks); "
            "use 8 or 12, or set training.micro_batch_size to 2 or 5",
        ),
        (
            ["training.micro_batch_size=4", "accelerator.pp_micro_batch_size=3"],
            "accelerator.pp_micro_batch_size",
            "must divide training.micro_batch_size = 4; use 2 or 4, or null",
        ),
        (
            [f"{PRECISION}.fp32_main_grad=true", "optimizer.fp32_main_params=true"],
            f"{PRECISION}.reduce_dtype",
            f"= null: must be float32 with {PRECISION}.fp32_main_grad: true; set {PRECISION}.reduce_dtype: float32",
        ),
        (
            [f"{PRECISION}={{fp32_main_grad: true, reduce_dtype: bfloat16}}", "optimizer.fp32_main_params=true"],
            f"{PRECISION}.reduce_dtype",
            "= 'bfloat16': must be float32",
        ),
        (
            [f"{PRECISION}={{fp32_main_grad: true, reduce_dtype: float32}}"],
            f"{PRECISION}.fp32_main_grad",
            "together with optimizer.fp32_main_params = false; set both to true",
        ),
        (
            ["optimizer.fp32_main_params=true"],
            f"{PRECISION}.fp32_main_grad",
            "together with optimizer.fp32_main_params = true",
        ),
        (["optimizer.betas=[0.9, 1.0]"], "optimizer.betas.1", "must be at least 0 and below 1"),
        (["optimizer.betas=[-0.1, 0.9]"], "optimizer.betas.0", "must be at least 0 and below 1"),
        (["optimizer.options={lr: 1}"], "optimizer.options.lr", "set optimizer.lr"),
        (
            ["optimizer._target_=os.system"],
            "optimizer._target_",
            "must be a class under torchtrain., torch.optim. or one of trusted_targets; use torch.optim.AdamW, or "
            "trust that code with trusted_targets: [os]",
        ),
        (["optimizer._target_=torch.optimism.Adam"], "optimizer._target_", "must be a class under"),
        (["optimizer._target_=AdamW"], "optimizer._target_", "must be a dotted class name"),
        (["optimizer._target_=torch.optim."], "optimizer._target_", "must be a dotted class name"),
        (["optimizer._target_=torch.optim.SparseAdam"], "optimizer._target_", "needs sparse gradients"),
        (["optimizer._target_=torch.optim.lbfgs.LBFGS"], "optimizer._target_", "needs a closure"),
        (["optimizer._target_=torch.optim.Adafactor"], "optimizer._target_", "does not compute on sharded parameters"),
        (["optimizer._target_=torch.optim.Rprop"], "optimizer._target_", "does not do on sharded parameters"),
        (["optimizer._target_=torch.optim.Muon"], "optimizer._target_", "use torchtrain.optim.muon.Muon"),
        (["trusted_targets=['']"], "trusted_targets.0", "must be a dotted import prefix"),
        (["lr_scheduler.min_lr_ratio=1.5"], "lr_scheduler.min_lr_ratio", "must be from 0 to 1"),
        ([WSD], "lr_scheduler.decay_steps", "warmup_steps = 50 into training.steps = 100; use 50 or fewer"),
        (["dataset.sources=[]"], "dataset.sources", "must name at least one source of text"),
        (["dataset.sources.0.weight=0"], "dataset.sources.0.weight", "must be above 0"),
        (["dataset.sources.0.path=' '"], "dataset.sources.0.path", "must not be empty"),
        (["dataset.sources.0.document_separator=''"], "dataset.sources.0.document_separator", "use null"),
        (
            ["dataset.sources=[{path: a/x.txt}, {path: b/x.txt}]"],
            "dataset.sources.1.name",
            "= 'x': must differ from the name of dataset.sources.0",
        ),
        (["dataset.holdout_fraction=1"], "dataset.holdout_fraction", "must be at least 0 and below 1"),
        (["dataset.holdout_fraction=-0.1"], "dataset.holdout_fraction", "must be at least 0 and below 1"),
        (
            ["task.eval_interval=5"],
            "dataset.holdout_fraction",
            "must be above 0 for evaluation: task.eval_interval is 5",
        ),
        (["tokenizer.kind=sentencepiece"], "tokenizer.path", "is required for tokenizer.kind: sentencepiece"),
        (["tokenizer={kind: bytes, path: x}"], "tokenizer.path", "has no meaning for tokenizer.kind: bytes"),
        (["profiling={trace_interval: 2, trace_steps: 3}"], "profiling.trace_steps", "use 2 or fewer"),
        ([PLUGIN, "accelerator.ep_size=2"], "accelerator.ep_size", "must agree with dist_config.ep_size = 4"),
        (["dist_config.ep_size=4"], "dist_config.ep_size", "write accelerator.ep_size"),
        (["dist_config.hook_modules=[a]"], "dist_config.hook_modules", "belongs to the plugin fsdpturbo"),
        (
            ["dist_config.fsdp_implementation=custom"],
            "dist_config.fsdp_implementation",
            "belongs to the plugin fsdpturbo",
        ),
    ],
)
def test_rule_is_explained_with_the_way_out(overrides, path, said):
    faults = faults_of(*overrides)
    assert list(faults) == [path]
    assert said in faults[path]


@pytest.mark.parametrize(
    "overrides",
    [
        [PLUGIN],
        [PLUGIN, "accelerator.ep_size=4"],
        ["optimizer._target_=torchtrain.optim.muon.Muon"],
        ["optimizer._target_=mine.Lion", "trusted_targets=[mine]"],
        ["optimizer._target_=mine.Lion", "trusted_targets=[mine.]"],
        [f"{PRECISION}={{fp32_main_grad: true, reduce_dtype: float32}}", "optimizer.fp32_main_params=true"],
        ["training.max_grad_norm=null", "lr_scheduler.warmup_steps=100"],
        ["dataset.holdout_fraction=0.1", "task.eval_interval=5"],
        ["dataset.sources=[{path: a/x.txt}, {path: b/x.txt, name: y}]"],
    ],
)
def test_legal_combination_passes(overrides):
    assert faults_of(*overrides) == {}


@pytest.mark.parametrize(
    ("override", "condition"),
    [
        ("fsdp_config.edp_shard_size=2", "accelerator.ep_size > 1"),
        ("fsdp_config.mix_precision.cast_forward_inputs=false", "fsdp_config.mix_precision.param_dtype"),
        ("fsdp_config.comm_fusion_zero_copy=true", "fsdp_config.comm_fusion: true"),
        ("accelerator.cp_mode=ring", "accelerator.cp_size > 1"),
        ("accelerator.pp_schedule=GPipe", "accelerator.pp_size > 1"),
        ("accelerator.pp_micro_batch_size=1", "accelerator.pp_size > 1"),
        ("accelerator.sequence_parallel=true", "accelerator.tp_size > 1"),
        ("accelerator.loss_parallel=true", "accelerator.tp_size > 1"),
        ("dist_config.ep_dispatcher=mc2", "accelerator.ep_size > 1"),
        ("compile.fullgraph=true", "compile.enabled: true"),
        ("activation_checkpoint.every_n_blocks=3", "activation_checkpoint.mode: every_nth_block"),
        ("activation_checkpoint.recompute_exchange=true", "accelerator.ep_size > 1"),
        ("accelerator.pp_layers=[1, 2]", "accelerator.pp_size > 1"),
        ("lr_scheduler.decay_steps=10", "lr_scheduler.name: wsd"),
        ("lr_scheduler.min_lr_ratio=0.2", "an lr_scheduler.name other than constant"),
    ],
)
def test_setting_without_its_precondition_is_named_with_the_condition(override, condition):
    (warning,) = find_job_warnings(read_job(None, [override]).job)
    path, _, value = override.partition("=")
    assert warning == f"{path} = {value} has no effect: it needs {condition}" or warning.startswith(
        f"{path} = {value} has no effect: it needs {condition} and"
    )


def test_a_background_save_of_nothing_is_warned_about():
    words = ["checkpoint={async_save: true, save_final: false}"]
    (warning,) = find_job_warnings(read_job(None, words).job)
    assert warning.endswith("has no effect: it needs checkpoint.interval > 0 or checkpoint.save_final: true")
    assert find_job_warnings(read_job(None, [*words, "checkpoint.interval=2"]).job) == []


def test_met_precondition_silences_the_warning():
    words = [
        "fsdp_config={comm_fusion: true, comm_fusion_zero_copy: false, edp_shard_size: 2}",
        "accelerator.ep_size=2",
    ]
    assert find_job_warnings(read_job(None, words).job) == []


def test_low_precision_storage_is_warned_about():
    (warning,) = find_job_warnings(read_job(None, ["model.init_dtype=bfloat16"]).job)
    assert "keeps the optimizer's state in that dtype too" in warning


def test_a_warmup_longer_than_the_run_is_legal_and_warned_about():
    words = [SOURCES, "training.steps=5", "lr_scheduler={name: wsd, warmup_steps: 15, decay_steps: 3}"]
    assert faults_of(*words) == {}
    (warning,) = find_job_warnings(read_job(None, words).job)
    assert warning == (
        "lr_scheduler.warmup_steps = 15 outlasts training.steps = 5: the learning rate never reaches optimizer.lr"
    )


def test_holdout_that_nothing_reads_is_warned_about():
    (warning,) = find_job_warnings(read_job(None, ["dataset.holdout_fraction=0.1"]).job)
    assert "task.eval_interval is 0" in warning


def test_nearest_legal_values():
    assert nearest_multiples(9, of=4) == "8 or 12"
    assert nearest_multiples(3, of=4) == "4"
    assert nearest_divisors(3, of=8) == "2 or 4"
    assert nearest_divisors(9, of=8) == "8"
