"""The ``torchtrain`` command: ``torchtrain train JOB …`` and ``torchtrain config JOB …``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchtrain import train
from torchtrain.config.dump import dump_job
from torchtrain.errors import TorchtrainError
from torchtrain.runtime.env import read_intended_ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        Its exit code; 2 for a wrong job or command line.
    """
    parser = argparse.ArgumentParser(
        prog="torchtrain",
        description="An LLM trainer that can prove its gradients.",
        usage="torchtrain {train,config} [--world-size N] JOB [--a.b=c ...]",
        epilog="Every key of a job with its default: docs/config_reference.md.",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=("train", "config"), help="train a job, or print it checked and resolved")
    parser.add_argument(
        "--world-size",
        type=_positive,
        help="config: ranks to check the job for; default WORLD_SIZE or NGPU, else the fewest that the job runs on",
    )
    options, arguments = parser.parse_known_args(argv)
    if options.command == "train":
        return train.main(arguments)
    try:
        told = options.world_size or read_intended_ranks()
        world_size = told or train.count_fewest_ranks(arguments)
        checked = train.check_job(arguments, world_size)
    except TorchtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(dump_job(checked.job), end="", flush=True)
    if told is None and world_size > 1:
        print(
            f"note: checked for {world_size} ranks, the fewest that it fits (NGPU={world_size} ./run_train.sh JOB); "
            "for N ranks: torchtrain config --world-size N JOB",
            file=sys.stderr,
        )
    for warning in train.find_warnings(arguments, checked):
        print(f"warning: {warning}", file=sys.stderr)
    print(train.describe_kernels(checked), end="", flush=True)
    errors = train.find_late_errors(checked)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return max((error.exit_code for error in errors), default=0)


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of ranks, at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
