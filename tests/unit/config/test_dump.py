from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from torchtrain.config.dump import dump_job
from torchtrain.config.job import Job
from torchtrain.config.load import load_job, read_job
from torchtrain.config.optimization import OptimizerConfig
from torchtrain.config.schema import job_keys
from torchtrain.config.training import TaskConfig

# Files in UTF-8 hold no surrogates.
_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def test_dumped_job_loads_to_an_equal_job(tmp_path):
    words = [
        'dataset.sources=[{path: a, weight: 2, document_separator: "\\n\\n"}, {path: b.jsonl}]',
        "optimizer={_target_: torch.optim.SGD, lr: 1e-05, options: {momentum: 0.9, nesterov: true}}",
        "training.max_grad_norm=null",
        "task.sample_prompt='1e-3'",
        "tokenizer.path='yes'",
        "model.overrides={hidden_size: 64, rope_scaling: {factor: 8.0}}",
    ]
    job = load_job(None, words)
    (tmp_path / "job.yaml").write_text(dump_job(job))
    assert load_job(tmp_path / "job.yaml") == job


@settings(max_examples=25, deadline=None)
@given(lr=st.floats(min_value=1e-300, max_value=1e300), prompt=_text)
@example(lr=1e-05, prompt="\x85")  # once came back as a space
@example(lr=1e-05, prompt="\u674e\u767d \u2028")
def test_any_number_and_text_survives_a_dump(tmp_path_factory, lr, prompt):
    path = tmp_path_factory.mktemp("job") / "job.yaml"
    job = Job(optimizer=OptimizerConfig(lr=lr), task=TaskConfig(sample_prompt=prompt))
    path.write_text(dump_job(job), encoding="utf-8")
    assert read_job(path).job == job


def test_dump_holds_every_key_under_its_name_in_the_file():
    dumped = YAML(typ="safe", pure=True).load(dump_job(Job()))
    for path in job_keys():
        if "*" not in path:
            node = dumped
            for step in path.split("."):
                node = node[step]


def test_sections_keep_their_order():
    assert list(YAML(typ="safe", pure=True).load(dump_job(Job())))[:3] == ["model", "training", "dataset"]
