"""Run a job for a few steps and show what it communicates: a table, the closed formula beside it, and a timeline.

    python scripts/trace_comms.py train_configs/llama/debug.yaml --ranks 2 --fsdp_config.dp_shard_size=2

Anything else on the command line is an override of the job, as for ``torchtrain.train``. The last step is shown, since
first ones warm up. Left in the output folder: ``comm_trace.jsonl``, ``comm_trace.txt`` (the table) and
``comm_timeline.png`` (rank 0).

Exit codes: 0; 1 where the run failed, ranks differ, or a byte differs from the formula; 2 where the job is wrong. The
formula speaks of FSDP's units and of context parallelism's attention, in jobs without tensor, expert or pipeline
parallelism; elsewhere there is only the trace.
"""

from __future__ import annotations

import argparse
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

from torchtrain.distributed.attention_volume import AttentionSizes, plan_attention_volume
from torchtrain.distributed.comm_volume import DTYPE_BYTES, CommVolume, plan_comm_volume
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


def predict(checked: CheckedJob) -> dict[Key, Amount] | None:
    """Evaluate the closed formula for a job; None where it does not apply."""
    job, topology = checked.job, checked.topology
    if topology.tp_size > 1 or topology.ep_size > 1 or topology.pp_size > 1 or not topology.has_fsdp_domain:
        return None
    # Importing torch takes seconds, which a wrong job need not wait for.
    import torch

    from models.registry import load_spec
    from torchtrain.distributed.fsdp2.units import plan_shards

    with torch.device("meta"):
        model = load_spec(job.model.name).build(checked.architecture)
    plan = plan_shards(model, job.fsdp_config, topology, {})
    volumes = plan_comm_volume(
        plan,
        job.fsdp_config,
        storage_dtype=job.model.init_dtype,
        num_micro_batches=topology.gradient_accumulation_steps(job.training),
    )
    volumes += _predict_attention(checked)
    return {_key(volume): Amount(volume.count, volume.bytes, volume.sent_bytes) for volume in volumes}


def _predict_attention(checked: CheckedJob) -> tuple[CommVolume, ...]:
    job, topology, architecture = checked.job, checked.topology, checked.architecture
    recompute, num_layers = job.activation_checkpoint, architecture.num_hidden_layers
    every = recompute.every_n_blocks if recompute.mode == "every_nth_block" else 1
    sizes = AttentionSizes(
        cp_size=topology.cp_size,
        num_tokens=job.training.micro_batch_size * job.training.seq_len,
        num_layers=num_layers,
        num_attention_heads=architecture.num_attention_heads,
        num_key_value_heads=architecture.num_key_value_heads,
        head_dim=architecture.head_dim,
        element_bytes=DTYPE_BYTES[job.fsdp_config.mix_precision.param_dtype or job.model.init_dtype],
    )
    return plan_attention_volume(
        job.accelerator.cp_mode,
        sizes,
        num_micro_batches=topology.gradient_accumulation_steps(job.training),
        num_recomputed_layers=0 if recompute.mode == "none" else -(-num_layers // every),
    )


def find_differences(measured: Amounts, predicted: Amounts) -> list[str]:
    """Say where what units and attention moved is not what the formula says."""
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
    """Whether the formula speaks of it: not of counts and losses, which no unit asks for either."""
    return key.unit != _NO_UNIT or (key.axis == "cp" and key.phase in ("forward", "backward"))


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


def _show(records: Sequence[Record], checked: CheckedJob, *, ranks: int, output_dir: Path) -> int:
    from torchtrain.metrics.comm_timeline import draw_timeline

    mine = [record for record in records if record["rank"] == 0]
    amounts, predicted = add_up(records, rank=0), predict(checked)
    differences = [] if predicted is None else find_differences(amounts, predicted)
    different_ranks = [rank for rank in range(ranks) if add_up(records, rank) != amounts]
    step = mine[0]["step"]
    title = f"{checked.job.model.name}/{checked.job.model.preset}, step {step}, rank 0 of {ranks}"
    with (output_dir / "comm_trace.txt").open("w", encoding="utf-8") as file:
        for console in (Console(width=None if sys.stdout.isatty() else _WIDTH), Console(file=file, width=_WIDTH)):
            console.print(title, style="bold")
            console.print(build_table(amounts, predicted))
    if predicted is None:
        print("no closed formula: this job has no FSDP unit, or tensor, expert or pipeline parallelism too")
    elif not differences:
        print("every unit moves what the closed formula says, to the byte")
    for difference in differences:
        print(f"DIFFERENT: {difference}")
    if different_ranks:
        print(f"DIFFERENT: ranks {different_ranks} communicate otherwise than rank 0")
    picture = output_dir / "comm_timeline.png"
    draw_timeline(mine, title=title, out=picture)
    print(f"trace {output_dir / 'comm_trace.jsonl'}\ntable {output_dir / 'comm_trace.txt'}\ntimeline {picture}")
    return 1 if differences or different_ranks else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description="Trace the communication of a job's first steps.", epilog="Other words are overrides of the job."
    )
    parser.add_argument("job", help="job file")
    parser.add_argument("--steps", type=int, default=2, help="steps to run; the last one is shown")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this node")
    parser.add_argument("--out", type=Path, help="folder for everything; default outputs/comm_trace/<job>")
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
    return _show(records, checked, ranks=arguments.ranks, output_dir=output_dir)


if __name__ == "__main__":
    sys.exit(main())
