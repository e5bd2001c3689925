"""``docs/fsdp.md`` names a test for every line of the users' FSDP2 document, and every name there is a test's."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Lines of each section that is about FSDP alone; other sections are other techniques'.
LINES = {"4.1": 11, "4.2": 5, "5.2": 5, "5.3": 4, "5.6": 5, "5.7": 8, "5.8": 4, "5.9": 7, "5.10": 4, "5.11": 8}


def read_table(text: str) -> dict[str, list[str]]:
    """The tests of each line, as the table names them."""
    body = text.partition("## Line by line")[2]
    rows = re.findall(r"^\| (\d+(?:\.\d+)+) \|[^|]+\|([^|]+)\|$", body, flags=re.MULTILINE)
    assert len(rows) == len({line for line, _ in rows}), "a line has two rows"
    return {line: re.findall(r"`(tests/[^`]+)`", cell) for line, cell in rows}


@functools.cache
def read_test_names(path: str) -> frozenset[str]:
    """The test functions of a file; none where there is no file."""
    file = ROOT / path
    tree = ast.parse(file.read_text() if file.is_file() else "")
    return frozenset(
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def find_missing_tests(table: dict[str, list[str]]) -> Iterator[str]:
    for line, names in table.items():
        if not names:
            yield f"{line} names no test"
        for name in names:
            path, _, function = name.partition("::")
            if function not in read_test_names(path):
                yield f"{line}: {name} is no test"


def test_every_test_that_the_table_names_exists() -> None:
    assert list(find_missing_tests(read_table((ROOT / "docs" / "fsdp.md").read_text()))) == []


def test_every_line_of_the_document_has_its_row() -> None:
    expected = [f"{section}.{number}" for section, count in LINES.items() for number in range(1, count + 1)]
    assert list(read_table((ROOT / "docs" / "fsdp.md").read_text())) == expected


def test_a_name_that_is_no_test_is_noticed() -> None:
    real = "tests/architecture/test_fsdp_document_table.py"
    rows = [
        f"| 5.2.1 | a | `{real}::test_every_test_that_the_table_names_exists` |",
        f"| 5.2.2 | b | `{real}::test_gone`, `{real}::read_table` |",
        "| 5.2.3 | c | `tests/gone.py::test_gone` |",
        "| 5.2.4 | d | later |",
    ]
    found = list(find_missing_tests(read_table("## Line by line\n" + "\n".join(rows))))
    assert [place.partition(" ")[0].rstrip(":") for place in found] == ["5.2.2", "5.2.2", "5.2.3", "5.2.4"]
