"""Rows that run with ``--extended`` only: each repeats on other sizes or modes what a row that always runs shows.

The suite that always runs covers every technique, every pair of techniques that the parity table promises and every
broken law, and ends in the time that one waits for. ``./run_tests.sh --extended`` runs these rows too.
"""

from __future__ import annotations

EXTENDED = (
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
    "tests/parity/test_expert_parallel.py::*[[]tp2]",
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
