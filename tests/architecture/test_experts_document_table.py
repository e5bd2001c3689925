"""``docs/experts.md`` names a test for each known fault and each line of the users' document, and each broken law."""

from __future__ import annotations

import ast
import re

from tests.architecture.test_fsdp_document_table import ROOT, find_missing_tests, read_table

TEXT = (ROOT / "docs" / "experts.md").read_text()
# Lines of each section; 4 is about imports of a package that this one does not have.
LINES = {"1": 9, "2": 3, "3": 4, "5": 3, "6": 2, "7": 2, "8": 2}
LAWS = ("tests/parity/test_expert_parallel.py", "tests/parity/test_fsdpturbo.py")


def read_faults() -> dict[str, tuple[str, str]]:
    """The tests and the broken laws of each fault."""
    body = TEXT.partition("## Known faults")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|([^|]+)\|([^|]*)\|$", body, flags=re.MULTILINE)[1:]
    return {fault: (tests, laws) for fault, tests, laws in rows if not fault.startswith("---")}


def read_broken_laws(path: str) -> set[str]:
    """Names of the functions that are keys of a file's ``MUTATIONS``."""
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "MUTATIONS":
            assert isinstance(node.value, ast.Dict)
            return {ast.unparse(key) for key in node.value.keys if key is not None}
    return set()


def test_every_line_of_the_document_has_its_row_and_its_tests() -> None:
    table = read_table(TEXT)
    assert list(table) == [f"{section}.{n}" for section, count in LINES.items() for n in range(1, count + 1)]
    assert list(find_missing_tests(table)) == []


def test_every_known_fault_has_a_test_and_every_broken_law_its_row() -> None:
    faults = read_faults()
    assert len(faults) >= 10
    assert (
        list(find_missing_tests({f: re.findall(r"`(tests/[^`]+)`", tests) for f, (tests, _) in faults.items()})) == []
    )
    named = {law for _, laws in faults.values() for law in re.findall(r"`(\w+)`", laws)}
    assert named == set().union(*map(read_broken_laws, LAWS))
