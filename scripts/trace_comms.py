"""Run a job for a few steps and show what it communicates: a table, the closed formula beside it, and a timeline.

    python scripts/trace_comms.py train_configs/llama/debug.yaml --ranks 2 --fsdp_config.dp_shard_size=2

Anything else on the command line is an override of the job, as for ``torchtrain.train``. The last step is shown, since
first ones warm up. Left in the output folder: ``comm_trace.jsonl``, ``comm_trace.txt`` (the table) and
``comm_timeline.png`` (rank 0; ``comm_timeline_rank2.png`` and so on for other stages). A model with experts also leaves
``expert_timeline.png``: one layer's exchanges beside its products. ``--beside FOLDER`` draws those of an earlier trace
above it, on one scale: the same job with another dispatcher, say.

Ranks of a pipeline do different things: the table and the picture come once for each stage, of its first rank. Every
rank is held to its own formula, in which all techniques are added up (``distributed.job_volume``); what differs is
named. Rows without a formula are scalars: counts of tokens, the loss, the gradient norm.

Exit codes: 0; 1 where the run failed, ranks of a stage differ though their formulas do not, or a byte differs from the
formula; 2 where the job is wrong. For some jobs there is no formula, which is said with the reason: only the trace is
left then.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchtrain.distributed.comm_volume import CommVolume
from torchtrain.errors import TorchtrainError
from torchtrain.metrics.jsonl import read_jsonl
from torchtrain.train import CheckedJob, check_job

Record = dict[str, Any]
_QUIET = ("--checkpoint.interval=0", "--checkpoint.save_final=false", "--checkpoint.resume=null")
_QUIET += ("--task.eval_interval=0", "--task.sample_prompt=null", "--metrics.console=plain", "--debug.comm_trace=true")
_NO_UNIT = "(no unit)"
_WIDTH = 140
"""Of the table where no terminal says otherwise."""


@dataclass(frozen=True)
class Key:
    """What is counted together."""

    unit: str
    phase: str
    kind: str
    axis: str


@dataclass(frozen=True)
class Amount:
    """How often, how much in all, and how much of it one rank sends."""

    count: int = 0
    bytes: int = 0
    sent_bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.count + other.count, self.bytes + other.bytes, self.sent_bytes + other.sent_bytes)


Amounts = Mapping[Key, Amount]


class TraceError(Exception):
    """The job could not be traced; the message says why."""


def run_job(job_path: str, words: Sequence[str], *, ranks: int, output_dir: Path) -> list[Record]:
    """Train in fresh processes and return the records of the last step.

    Raises:
        TraceError: It failed.
    """
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    command = (*launcher, "-m", "torchtrain.train", job_path, *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise TraceError(f"the job ended with exit code {done.returncode}:\n{tail}")
    return read_last_step(output_dir)


def read_last_step(output_dir: Path) -> list[Record]:
    """Read the records of all ranks in the last step that was traced into a folder."""
    records = read_jsonl(output_dir / "comm_trace.jsonl")
    last_step = max(record["step"] for record in records)
    return [record for record in records if record["step"] == last_step]


def add_up(records: Sequence[Record], rank: int) -> dict[Key, Amount]:
    """Amounts of one rank, in the order in which each first occurred."""
    amounts: dict[Key, Amount] = defaultdict(Amount)
    for record in records:
        if record["record"] == "collective" and record["rank"] == rank:
            key = Key(record["unit"] or _NO_UNIT, record["phase"], record["kind"], record["axis"])
            amounts[key] += Amount(1, record["bytes"], record["sent_bytes"])
    return dict(amounts)


def predict(checked: CheckedJob, rank: int) -> dict[Key, Amount] | str:
    """Evaluate the closed formulas for one rank of a job, or say why there are none."""
    # Importing torch takes seconds, which a wrong job need not wait for.
    import torch

    from models.registry import load_spec
    from torchtrain.distributed.job_volume import find_missing_formula, plan_job_volume
    from torchtrain.nn.moe import MoE

    with torch.device("meta"):
        model = load_spec(checked.job.model.name).build(checked.architecture)
    has_experts = any(isinstance(module, MoE) for module in model.modules())
    if reason := find_missing_formula(checked.job, checked.topology, has_experts=has_experts):
        return reason
    family = importlib.import_module(f"models.{checked.job.model.name}.parallelize")
    volumes = plan_job_volume(
        checked.job, checked.topology, model, rank=rank, tensor_parallel_table=family.TENSOR_PARALLEL_TABLE
    )
    return {_key(volume): Amount(volume.count, volume.bytes, volume.sent_bytes) for volume in volumes}


def find_differences(measured: Amounts, predicted: Amounts) -> list[str]:
    """Say where one rank moved what its formula does not say."""
    keys = [key for key in {**measured, **predicted} if _has_formula(key)]
    return [
        f"{key.unit}, {key.kind} in {key.phase} over {key.axis}: the trace has {measured.get(key, Amount())}, "
        f"the formula {predicted.get(key, Amount())}"
        for key in keys
        if measured.get(key) != predicted.get(key)
    ]


def merge_equal_units(amounts: Amounts) -> Iterator[tuple[str, list[tuple[Key, Amount]]]]:
    """Yield each unit's rows in order of use, what no unit asked for last; neighbours with equal rows become one."""
    rows: dict[str, list[tuple[Key, Amount]]] = defaultdict(list)
    for key, amount in sorted(amounts.items(), key=lambda item: item[0].unit == _NO_UNIT):
        rows[key.unit].append((key, amount))
    merged: list[list[str]] = []
    for unit in rows:
        if merged and unit != _NO_UNIT and _content(rows[unit]) == _content(rows[merged[-1][0]]):
            merged[-1].append(unit)
        else:
            merged.append([unit])
    for units in merged:
        name = units[0] if len(units) == 1 else f"{units[0]} … {units[-1]} ({len(units)} units, each)"
        yield name, rows[units[0]]


def build_table(amounts: Amounts, predicted: Amounts | None) -> Table:
    """Lay amounts out per unit and axis, with the formula beside them and the sums below."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for heading in ("unit", "axis", "collective", "phase"):
        table.add_column(heading, no_wrap=True)
    for heading in ("count", "bytes", "sent by a rank", "formula"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, rows in merge_equal_units(amounts):
        for index, (key, amount) in enumerate(rows):
            table.add_row("" if index else name, *_cells(key, amount), _verdict(key, amount, predicted))
        table.add_section()
    sums: dict[Key, Amount] = defaultdict(Amount)
    for key, amount in amounts.items():
        sums[Key("all", "", key.kind, key.axis)] += amount
    for index, (key, amount) in enumerate(sums.items()):
        table.add_row("" if index else "all, of one step", *_cells(key, amount), "", style="bold")
    table.add_row("", "", "all", "", *_numbers(sum(sums.values(), Amount())), "", style="bold")
    return table


def _key(volume: CommVolume) -> Key:
    return Key(volume.unit or _NO_UNIT, volume.phase, volume.kind, volume.axis)


def _has_formula(key: Key) -> bool:
    """Whether the formulas speak of it: not of scalars, which no unit asks for, once backward is over."""
    return key.unit != _NO_UNIT or key.phase in ("forward", "backward", "pipeline") or key.axis == "tp"


def _content(rows: Sequence[tuple[Key, Amount]]) -> set[tuple[str, str, str, Amount]]:
    return {(key.phase, key.kind, key.axis, amount) for key, amount in rows}


def _cells(key: Key, amount: Amount) -> tuple[str, ...]:
    return (key.axis, key.kind.replace("_", "-"), key.phase, *_numbers(amount))


def _numbers(amount: Amount) -> tuple[str, str, str]:
    return (f"{amount.count:,}", f"{amount.bytes:,}", f"{amount.sent_bytes:,}")


def _verdict(key: Key, amount: Amount, predicted: Amounts | None) -> Text:
    if predicted is None or not _has_formula(key):
        return Text("")
    expected = predicted.get(key, Amount())
    return Text("equal", "green") if amount == expected else Text(f"{expected.count:,} x, {expected.bytes:,}", "red")


def draw_experts(
    records: Sequence[Record], checked: CheckedJob, *, output_dir: Path, beside: Path | None
) -> list[Path]:
    """Draw the first layer with experts of rank 0, with that of an earlier trace above it; returns the picture, if any.

    Args:
        records: Of one step.
        checked: The job.
        output_dir: Where the picture goes.
        beside: Folder of the earlier trace.
    """
    from torchtrain.metrics.expert_timeline import draw_expert_layer, find_expert_layer

    own = [record for record in records if record["rank"] == 0]
    if find_expert_layer(own) is None:
        return []
    traces = {f"{output_dir.name} ({checked.job.dist_config.ep_dispatcher})": own}
    if beside is not None:
        traces = {beside.name: [record for record in read_last_step(beside) if record["rank"] == 0], **traces}
    picture = output_dir / "expert_timeline.png"
    draw_expert_layer(traces, out=picture)
    return [picture]


def show(
    records: Sequence[Record], checked: CheckedJob, *, ranks: int, output_dir: Path, beside: Path | None = None
) -> int:
    """Print and save tables and pictures, say what differs, and return the exit code."""
    from torchtrain.metrics.comm_timeline import draw_timeline

    predicted = {rank: predict(checked, rank) for rank in range(ranks)}
    measured = {rank: add_up(records, rank) for rank in range(ranks)}
    first_ranks = range(0, ranks, checked.topology.stage_size)
    pictures = []
    with (output_dir / "comm_trace.txt").open("w", encoding="utf-8") as file:
        consoles = (Console(width=None if sys.stdout.isatty() else _WIDTH), Console(file=file, width=_WIDTH))
        for rank in first_ranks:
            title, formula = _title(checked, records[0]["step"], rank, ranks), predicted[rank]
            table = build_table(measured[rank], None if isinstance(formula, str) else formula)
            for console in consoles:
                console.print(title, style="bold")
                console.print(table)
            pictures.append(output_dir / f"comm_timeline{f'_rank{rank}' if rank else ''}.png")
            draw_timeline([record for record in records if record["rank"] == rank], title=title, out=pictures[-1])
    pictures += draw_experts(records, checked, output_dir=output_dir, beside=beside)
    differences = list(compare_ranks(measured, predicted, stage_size=checked.topology.stage_size))
    if isinstance(predicted[0], str):
        print(f"no closed formula: {predicted[0]}")
    elif not differences:
        print(f"every unit and axis moves what the closed formulas say, to the byte, on {_count_ranks(ranks)}")
    for difference in differences:
        print(f"DIFFERENT: {difference}")
    print(f"trace {output_dir / 'comm_trace.jsonl'}\ntable {output_dir / 'comm_trace.txt'}")
    print("\n".join(f"timeline {picture}" for picture in pictures))
    return 1 if differences else 0


def compare_ranks(
    measured: Mapping[int, Amounts], predicted: Mapping[int, Amounts | str], *, stage_size: int
) -> Iterator[str]:
    """Say on which rank what differs from its formula, and which ranks differ from the first of their stage."""
    for rank, amounts in measured.items():
        formula, first = predicted[rank], rank - rank % stage_size
        if not isinstance(formula, str):
            yield from (f"rank {rank}: {difference}" for difference in find_differences(amounts, formula))
        if _without_exchanges(amounts) != _without_exchanges(measured[first]) and formula == predicted[first]:
            yield f"rank {rank} communicates otherwise than rank {first}"


def _without_exchanges(amounts: Amounts) -> Amounts:
    """What does not depend on where the router sends the tokens of a rank."""
    return {key: amount for key, amount in amounts.items() if key.axis != "ep"}


def _title(checked: CheckedJob, step: int, rank: int, ranks: int) -> str:
    topology = checked.topology
    stage = f", pipeline rank {rank // topology.stage_size} of {topology.pp_size}" if topology.pp_size > 1 else ""
    return f"{checked.job.model.name}/{checked.job.model.preset}, step {step}, rank {rank} of {ranks}{stage}"


def _count_ranks(ranks: int) -> str:
    return "the one rank" if ranks == 1 else f"all {ranks} ranks"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description="Trace the communication of a job's first steps.", epilog="Other words are overrides of the job."
    )
    parser.add_argument("job", help="job file")
    parser.add_argument("--steps", type=int, default=2, help="steps to run; the last one is shown")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this node")
    parser.add_argument("--out", type=Path, help="folder for everything; default outputs/comm_trace/<job>")
    parser.add_argument("--beside", type=Path, help="folder of an earlier trace, whose experts are drawn above")
    arguments, overrides = parser.parse_known_args(argv)
    if arguments.steps < 1 or arguments.ranks < 1:
        parser.error("--steps and --ranks must be at least 1")
    output_dir = arguments.out or Path("outputs", "comm_trace", Path(arguments.job).stem)
    own = (f"--training.steps={arguments.steps}", f"--training.output_dir={output_dir}")
    words = [*overrides, *_QUIET, *own]
    try:
        checked = check_job([arguments.job, *words], arguments.ranks)
        records = run_job(arguments.job, words, ranks=arguments.ranks, output_dir=output_dir)
    except TorchtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return show(records, checked, ranks=arguments.ranks, output_dir=output_dir, beside=arguments.beside)


if __name__ == "__main__":
    sys.exit(main())
