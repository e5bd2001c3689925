"""Train the sentencepiece BPE tokenizer of the repository on its corpus.

The same text and options give the same file byte for byte. Run: ``python scripts/train_tokenizer.py``.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

ASSETS = Path(__file__).parents[1] / "assets"


def read_lines(corpus: Path) -> Iterator[str]:
    """Yield every line of the folder's text files, in name order."""
    for path in sorted(corpus.rglob("*.txt")):
        yield from path.read_text(encoding="utf-8").splitlines()


def train(corpus: Path, *, vocab_size: int) -> bytes:
    """Return a sentencepiece model that gives every text back unchanged when decoded."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=read_lines(corpus),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        byte_fallback=True,  # no text is unknown
        character_coverage=1.0,
        # Sentencepiece would drop line breaks and squeeze blanks, which are the form of a play.
        user_defined_symbols=["\n"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_digits=True,
        num_threads=1,
        minloglevel=1,
    )
    return model.getvalue()


def main() -> None:
    """Read the options, train, write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=ASSETS / "corpus")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--output", type=Path, default=ASSETS / "tokenizer" / "shakespeare_4k.model")
    options = parser.parse_args()
    model = train(options.corpus, vocab_size=options.vocab_size)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_bytes(model)
    print(f"{options.output}: {options.vocab_size} pieces, {len(model)} bytes")


if __name__ == "__main__":
    main()
