"""The table in ``docs/parallelism.md`` is what the rules of the job check say."""

from __future__ import annotations

from scripts.write_legality_table import legality_table, main


def test_committed_table_is_current() -> None:
    assert main(["--check"]) == 0, "run: python scripts/write_legality_table.py"


def test_table_names_reasons_and_conditions() -> None:
    table = legality_table()
    assert "| expert parallel | no: it has no experts" in table
    assert "tp_size divides num_attention_heads" in table
