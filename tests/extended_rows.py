"""Rows that run with ``--extended`` only: each repeats on other sizes or modes what a row that always runs shows.

The suite that always runs covers every technique, every pair of techniques that the parity table promises and every
broken law, and ends in the time that one waits for. ``./run_tests.sh --extended`` runs these rows too.
"""

from __future__ import annotations

EXTENDED = (
    "tests/end_to_end/test_main_params.py::test_over_200_steps*",
    "tests/distributed/test_checkpoint_parallel.py::*[[]torchtrain.optim.muon.Muon]",
    "tests/distributed/test_offload.py::*[[]saved_with1-resumed_with1]",
    "tests/distributed/test_offload.py::*[[]saved_with2-resumed_with2]",
    "tests/distributed/test_job_volume.py::*[[]replicate_tp_mains]",
    "tests/distributed/test_job_volume.py::*[[]fsdp_tp_sp_whole]",
    "tests/end_to_end/test_train.py::test_a_sample_begins_as_the_documents_do[[]Line]",
    "tests/end_to_end/test_train.py::test_a_step_whose_fp16*[[]2]",
    "tests/end_to_end/test_train.py::test_four_ranks*[[]fsdp_config.dp_shard_size=2]",
    "tests/parity/test_topologies.py::*[[]accumulate_hsdp_sync_every]",
    "tests/parity/test_topologies.py::*[[]whole_parameters]",
    "tests/parity/test_context_parallel.py::*[[]cp2_ulysses_plain]",
    "tests/parity/test_context_parallel.py::*[[]cp2_allgather_plain]",
    "tests/parity/test_context_parallel.py::*[[]cp4_ring_plain]",
    "tests/parity/test_context_parallel.py::*[[]cp2_accumulated]",
    "tests/parity/test_context_parallel.py::*[[]pp2_cp2_ring]",
    "tests/parity/test_context_parallel.py::test_bf16*",
    "tests/parity/test_combinations.py::*[[]tp2_cp2_plain]",
    "tests/parity/test_combinations.py::*[[]pp2_fsdp2_plain]",
    "tests/parity/test_combinations.py::*[[]pp2_tp2]",
    "tests/parity/test_combinations.py::*[[]pp2_cp2_allgather_plain]",
    "tests/parity/test_pipeline.py::*[[]replicas]",
    "tests/parity/test_pipeline.py::*[[]loops_fsdp]",
    "tests/parity/test_pipeline.py::*[[]looped_bfs_built_with_memory]",
    "tests/parity/test_pipeline.py::*[[]tensor]",
    "tests/parity/test_pipeline.py::*[[]ring_in_a_v]",
    "tests/parity/test_tensor_parallel.py::*[[]tp2_sp_accumulate]",
    "tests/parity/test_tensor_parallel.py::*[[]fsdp2_tp2_sp_sync_every]",
    "tests/parity/test_tensor_parallel.py::*[[]replicate2_tp2_sp_lp]",
    "tests/parity/test_tensor_parallel.py::*[[]built_with_memory]",
    "tests/parity/test_combinations.py::*[[]fsdp2_tp2_plain]",
    "tests/parity/test_combinations.py::*[[]pp2_fsdp2_tp2_sp]",
    "tests/parity/test_expert_parallel.py::*[[]tp2]",
    "tests/parity/test_expert_parallel.py::*[[]ep2_hsdp_tp2_sp]",
    "tests/parity/test_expert_parallel.py::*[[]muon]",
    "tests/parity/test_expert_parallel.py::*[[]ep2_tp2_sp]",
    "tests/parity/test_qwen3_5_moe.py::*[[]compiled]",
    "tests/parity/test_context_parallel.py::*[[]cp2_allgather_compiled]",
    "tests/parity/test_expert_parallel.py::*[[]ep2_pp2]",
    "tests/parity/test_expert_parallel.py::*[[]ep4_cp2_allgather]",
    "tests/parity/test_expert_parallel.py::*[[]recompute]",
    "tests/parity/test_expert_parallel.py::*[[]zero_copy]",
    "tests/parity/test_fsdpturbo.py::*[[]cp2_efsdp2]",
    "tests/parity/test_qwen3_5_moe.py::*[[]fsdp2_plain]",
    "tests/parity/test_qwen3_5_moe.py::*[[]recompute_selective]",
    "tests/parity/test_qwen3_5_moe.py::*[[]chunks_of_64]",
)
"""Globs over node ids."""
