"""Options of the test command."""

from __future__ import annotations

import pytest

from torchtrain.testing.ranks import preload

preload("tests.parity.harness", "models.llama.spec", "models.qwen2.spec", "models.qwen3.spec", "models.qwen3_moe.spec")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-jobs", type=int, default=25, help="legal jobs drawn and held against one rank")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "random_job_seed" in metafunc.fixturenames:
        metafunc.parametrize("random_job_seed", range(metafunc.config.getoption("--random-jobs")))
