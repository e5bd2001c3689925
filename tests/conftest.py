"""Options of the test command."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from tests.extended_rows import EXTENDED
from torchtrain.testing.ranks import preload

preload("tests.parity.harness", "models.llama.spec", "models.qwen2.spec", "models.qwen3.spec", "models.qwen3_moe.spec")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-jobs", type=int, default=25, help="legal jobs drawn and held against one rank")
    parser.addoption("--extended", action="store_true", help="also run the rows of tests/extended_rows.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--extended"):
        return
    chosen = {pattern: [item for item in items if fnmatchcase(item.nodeid, pattern)] for pattern in EXTENDED}
    idle = [pattern for pattern, matches in chosen.items() if not matches]
    if idle and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        raise pytest.UsageError(f"tests/extended_rows.py names no test with {', '.join(idle)}")
    extended = [item for matches in chosen.values() for item in matches]
    config.hook.pytest_deselected(items=extended)
    items[:] = [item for item in items if item not in extended]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "random_job_seed" in metafunc.fixturenames:
        metafunc.parametrize("random_job_seed", range(metafunc.config.getoption("--random-jobs")))
