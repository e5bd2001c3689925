"""Real weights: SmolLM2-135M from Hugging Face's format through training on several ranks and back.

Skipped where nobody has run ``scripts/fetch_smollm2.py``. Four minutes on two busy cores, 6 GB of memory.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from models.registry import load_spec
from tests.end_to_end.launch import Training
from torchtrain.checkpoint.hf_folder import SliceReader, open_folder
from torchtrain.checkpoint.hf_import import load_weights, plan_import, read_model_names
from torchtrain.config.load import load_job
from torchtrain.data.batch import Batch
from torchtrain.data.dataset import build_dataset
from torchtrain.data.loader import build_train_loader
from torchtrain.data.tokenizer import build_tokenizer
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import FP32_SCALAR, MODEL_OUTPUT
from torchtrain.train import check_job

ROOT = Path(__file__).parents[2]
WEIGHTS = ROOT / ".cache" / "smollm2_135m"
JOB = ROOT / "train_configs" / "llama" / "smollm2_135m_finetune.yaml"
FSDP2_TP3 = ("fsdp_config.dp_shard_size=2", "accelerator.tp_size=3")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (WEIGHTS / "config.json").is_file(), reason=f"{WEIGHTS} is not there: run scripts/fetch_smollm2.py"
    ),
]


def words(folder: Path, name: str, *overrides: str) -> list[str]:
    """The job as it ships, shortened; Hugging Face knows no packed documents, so these are one stream here."""
    return [
        str(JOB),
        f"--model.hf_path={WEIGHTS}",
        f"--tokenizer.path={WEIGHTS / 'tokenizer.json'}",
        f"--dataset.sources=[{{path: {ROOT / 'assets' / 'corpus'}, name: shakespeare}}]",
        f"--dataset.cache_dir={folder / 'cache'}",
        f"--training.output_dir={folder / name}",
        "--dataset.document_aware=false",
        "--training.steps=2",
        "--training.seq_len=32",
        "--lr_scheduler.name=constant",
        "--task.eval_interval=0",
        "--task.sample_prompt=null",
        "--checkpoint.export_hf=false",
        "--metrics.tensorboard=false",
        "--accelerator.device=cpu",
        *(f"--{override}" for override in overrides),
    ]


def train(folder: Path, name: str, *overrides: str, world_size: int) -> list[float]:
    training = Training([words(folder, name, *overrides)], world_size, folder / f"{name}.txt")
    assert training.wait(400.0) == [0] * world_size, training.said()
    return [json.loads(line)["loss"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def first_batch(folder: Path) -> Batch:
    job = load_job(JOB, words(folder, "unused")[1:])
    dataset = build_dataset(job, build_tokenizer(job.tokenizer), vocab_size=49_152, show_progress=False)
    loader = build_train_loader(
        dataset,
        training=job.training,
        dp_rank=0,
        dp_size=1,
        start_step=0,
        start_sequence=0,
        num_workers=0,
    )
    batches = iter(loader)
    rows = [next(batches) for _ in range(job.training.global_batch_size // job.training.micro_batch_size)]
    return Batch(
        **{n: None if v is None else torch.cat([getattr(r, n) for r in rows]) for n, v in vars(rows[0]).items()}
    )


def hugging_face(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM  # here, because it takes seconds that a skipped test need not wait

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def hugging_faces_loss(folder: Path, batch: Batch) -> float:
    with torch.no_grad():
        logits_BTV = hugging_face(folder)(batch.input_ids_BT).logits
    return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch.labels_BT.flatten()).item()


def our_logits(folder: Path, input_ids_BT: torch.Tensor) -> torch.Tensor:
    checked = check_job([str(JOB)], 1)
    spec = load_spec("llama")
    model = spec.build(checked.architecture)
    opened = open_folder(folder)
    report = plan_import(read_model_names(model), opened.tensors, spec.hugging_face.weights)
    with SliceReader(opened) as reader, torch.no_grad():
        load_weights(model, report, reader)
        return model(input_ids_BT)


def test_training_starts_where_hugging_face_is_and_ends_where_it_reads(tmp_path: Path) -> None:
    batch = first_batch(tmp_path)
    expected = hugging_faces_loss(WEIGHTS, batch)
    one_rank = train(tmp_path, "one", "checkpoint.save_final=false", world_size=1)
    assert relative_error(torch.tensor(one_rank[0]), torch.tensor(expected)) <= 1e-4
    fsdp_tp = train(tmp_path, "fsdp2_tp3", *FSDP2_TP3, "checkpoint.save_final=false", world_size=6)
    four = train(tmp_path, "four", "fsdp_config.dp_shard_size=4", world_size=4)
    for losses in (fsdp_tp, four):
        assert relative_error(torch.tensor(losses), torch.tensor(one_rank)) <= FP32_SCALAR
    checkpoint = tmp_path / "four" / "checkpoints" / "step_00000002"
    resume = (f"checkpoint.resume={checkpoint}", "training.steps=3", "checkpoint.export_hf=true")
    sharded = ("fsdp_config.dp_shard_size=2", "checkpoint.save_final=false")
    train(tmp_path, "two", *resume, *sharded, world_size=2)
    exported = tmp_path / "two" / "hugging_face"
    with torch.no_grad():
        theirs = hugging_face(exported)(batch.input_ids_BT).logits
    ours = our_logits(exported, batch.input_ids_BT)
    said = (tmp_path / "four.txt").read_text()
    print(*(line for line in said.splitlines() if "read per rank" in line))
    print(f"Hugging Face {expected:.6f}, one rank {one_rank}, FSDP2 x TP3 {fsdp_tp}, four {four}")
    print(f"logits after export differ by {relative_error(ours, theirs):.1e}")
    assert relative_error(ours, theirs) <= MODEL_OUTPUT
    assert hugging_faces_loss(exported, batch) < expected - 1e-3
    assert (exported / "tokenizer.json").read_bytes() == (WEIGHTS / "tokenizer.json").read_bytes()


def test_two_tensor_parallel_ranks_are_refused_with_what_divides(tmp_path: Path) -> None:
    training = Training([words(tmp_path, "tp2", "accelerator.tp_size=2")], 2, tmp_path / "said.txt")
    assert training.wait() == [2, 2]
    assert "num_attention_heads = 9" in training.said() or "num_key_value_heads = 3" in training.said()
