"""Why the pair exists: 200 steps of the same job in fp32, in bf16 storage alone, and in bf16 with fp32 mains."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from tests.end_to_end.launch import losses, train

STORAGE = ("model.init_dtype=bfloat16", "fsdp_config.mix_precision.param_dtype=float32")
PAIR = ("fsdp_config.mix_precision.reduce_dtype=float32", "fsdp_config.mix_precision.fp32_main_grad=true")
PAIR += ("optimizer.fp32_main_params=true",)


def final_loss(folder: Path, *overrides: str) -> float:
    """Mean of the last 20 steps. Compute is fp32 in every run: only what is stored between steps differs."""
    folder.mkdir()
    settings = (
        "training.steps=200",
        "fsdp_config.dp_shard_size=2",
        "fsdp_config.comm_fusion=true",  # Only fewer collectives, hence a shorter test.
        "optimizer.lr=1e-3",
        "checkpoint.save_final=false",
    )
    codes, said = train(folder, *settings, *overrides, world_size=2, timeout_s=240)
    assert codes == [0, 0], said
    return mean(losses(folder)[-20:])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_over_200_steps_the_pair_beats_bf16_alone_and_keeps_up_with_fp32(tmp_path: Path) -> None:
    fp32 = final_loss(tmp_path / "fp32")
    pair = final_loss(tmp_path / "pair", *STORAGE, *PAIR)
    bf16 = final_loss(tmp_path / "bf16", *STORAGE)
    print(f"mean loss of steps 181 to 200: fp32 {fp32:.4f}, bf16 with mains {pair:.4f}, bf16 alone {bf16:.4f}")
    assert pair < bf16 - 0.05
    assert abs(pair - fp32) < 0.2 * (bf16 - fp32)
