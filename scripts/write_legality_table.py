"""Write the table of model x technique into ``docs/parallelism.md``, from the rules that the job check uses.

    python scripts/write_legality_table.py [--check]

``--check`` changes nothing and ends with exit code 1 where the page is not what it would write.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from models.registry import FAMILIES, unsupported_techniques
from torchtrain.distributed.legality import RULES, Technique

PAGE = Path(__file__).parents[1] / "docs" / "parallelism.md"
BEGIN, END = "<!-- begin: scripts/write_legality_table.py -->\n", "<!-- end -->"


def legality_table() -> str:
    """Lay the rules out as Markdown: which family does what, then the conditions of each technique."""
    techniques: tuple[Technique, ...] = get_args(Technique)
    lines = [f"| technique | {' | '.join(FAMILIES)} |", f"|---|{'---|' * len(FAMILIES)}"]
    notes: list[str] = []
    for technique in techniques:
        cells = []
        for family in FAMILIES:
            reason = unsupported_techniques(family).get(technique)
            cells.append("yes" if reason is None else f"no: {reason}")
        lines.append(f"| {technique} | {' | '.join(cells)} |")
        conditions = [rule.condition for rule in RULES if rule.technique == technique]
        if conditions:
            notes.append(f"- **{technique}**: {'; '.join(conditions)}.")
    return "\n".join([*lines, "", *notes]) + "\n"


def main(argv: list[str]) -> int:
    """Write the page, or compare with it."""
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    wanted = f"{head}{BEGIN}{legality_table()}{END}{tail}"
    if "--check" in argv:
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
