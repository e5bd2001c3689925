"""Options of the test command."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest

from tests.extended_rows import EXTENDED
from torchtrain.testing.ranks import preload

preload("tests.parity.harness", "models.llama.spec", "models.qwen2.spec", "models.qwen3.spec", "models.qwen3_moe.spec")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--random-jobs", type=int, default=25, help="legal jobs drawn and held against one rank")
    parser.addoption("--extended", action="store_true", help="also run the rows of tests/extended_rows.py")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["is_whole_suite"] = node.config.args_source is pytest.Config.ArgsSource.TESTPATHS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--extended"):
        return
    # A worker of pytest-xdist is told the paths that its controller found by itself.
    is_whole_suite = getattr(config, "workerinput", {}).get(
        "is_whole_suite", config.args_source is pytest.Config.ArgsSource.TESTPATHS
    )
    chosen = {pattern: [item for item in items if fnmatchcase(item.nodeid, pattern)] for pattern in EXTENDED}
    idle = [pattern for pattern, matches in chosen.items() if not matches]
    if idle and is_whole_suite:
        raise pytest.UsageError(f"tests/extended_rows.py names no test with {', '.join(idle)}")
    extended = [item for matches in chosen.values() for item in matches]
    config.hook.pytest_deselected(items=extended)
    items[:] = [item for item in items if item not in extended]


@pytest.fixture
def chosen_rows(request: pytest.FixtureRequest) -> list[str]:
    """Parameters of this test in all the rows that the session runs: the names of those that can share ranks."""
    test = request.node
    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    rows = [item for item in functions if item.parent is test.parent and item.originalname == test.originalname]
    return [str(value) for item in rows for value in item.callspec.params.values()]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "random_job_seed" in metafunc.fixturenames:
        metafunc.parametrize("random_job_seed", range(metafunc.config.getoption("--random-jobs")))
