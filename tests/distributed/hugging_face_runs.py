"""What a rank does in tests of Hugging Face checkpoints; apart from them, so that no rank imports transformers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from models.registry import load_spec, resolve_architecture
from torchtrain.checkpoint.hf_folder import HuggingFaceFolder, SliceReader, open_folder
from torchtrain.checkpoint.hf_import import load_weights, plan_import, read_model_names
from torchtrain.config.load import load_job
from torchtrain.data.tokenizer import BytesTokenizer
from torchtrain.distributed.materialize import local_view
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.hugging_face.weight_map import Box
from torchtrain.optim.build import build_optimizer
from torchtrain.optim.main_params import MainParamOptimizer
from torchtrain.trainer.export import export_model
from torchtrain.trainer.run import Run, build_model


def fixed_tokens(vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, (2, 13), generator=torch.Generator().manual_seed(3))


@dataclass
class Travel:
    """What one rank tells of its model."""

    bytes_read: int
    bytes_owned: int
    largest_read: int
    """Bytes of the largest tensor read."""
    largest_owned: int
    """Bytes of this rank's largest parameter."""
    most_alive: int
    """Tensors read that were in memory at once."""
    logits: torch.Tensor | None
    are_mains_the_weights: bool


class WatchedReader(SliceReader):
    """Sees how much of what it read is in memory at a time."""

    def __init__(self, folder: HuggingFaceFolder) -> None:
        super().__init__(folder)
        self._given: list[weakref.ref[torch.Tensor]] = []
        self.largest = 0
        self.most_alive = 0

    def read(self, name: str, box: Box) -> torch.Tensor:
        values = super().read(name, box)
        self._given.append(weakref.ref(values))
        self._given = [given for given in self._given if given() is not None]
        self.most_alive = max(self.most_alive, len(self._given))
        self.largest = max(self.largest, values.nbytes)
        return values


def travel(overrides: tuple[str, ...], output: Path, *, wants_logits: bool = False) -> Travel:
    """Build a job's model from its ``model.hf_path``, read once more to count, and export; runs on a rank."""
    job = load_job(None, [*overrides, f"training.output_dir={output}"])
    topology = Topology.resolve(job, dist.get_world_size())
    architecture = resolve_architecture(job.model.name, job.model.preset, job.model.overrides)
    meshes = build_meshes(topology, torch.device("cpu"))
    run = Run(job, load_spec(job.model.name), architecture, meshes, is_main=dist.get_rank() == 0)
    model = build_model(run).module
    optimizer = build_optimizer(model, job.optimizer, device=meshes.device, is_stage=topology.pp_size > 1)
    mains = optimizer.main_params if isinstance(optimizer, MainParamOptimizer) else {}
    export_model(run, model, optimizer, BytesTokenizer())
    folder = open_folder(Path(str(job.model.hf_path)))
    with torch.device("meta"):
        names = read_model_names(run.spec.build(architecture))
    with WatchedReader(folder) as reader:
        load_weights(model, plan_import(names, folder.tensors, run.spec.hugging_face.weights), reader)
    owned = [4 * local_view(parameter)[0].numel() for parameter in model.parameters()]
    return Travel(
        bytes_read=reader.num_bytes,
        bytes_owned=sum(owned),
        largest_read=reader.largest,
        largest_owned=max(owned),
        most_alive=reader.most_alive,
        logits=model(fixed_tokens(architecture.vocab_size)).detach() if wants_logits else None,
        are_mains_the_weights=bool(mains)
        and all(torch.equal(local_view(main)[0], local_view(p)[0].float()) for p, main in mains.items()),
    )
