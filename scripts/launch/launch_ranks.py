"""torchrun, with the exit code and the signals of its workers.

``torchrun`` turns every failure of a worker into exit code 1 and answers a signal by giving the workers a fixed time
before it kills them. Schedulers read our exit codes (0, 2, 3, 143) and a checkpoint takes the time it takes, so this
starts the same agent with the same options, passes SIGINT and SIGTERM on, and waits.

Not for one rank on one machine: ``run_train.sh`` starts that one directly.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterable, Sequence
from types import FrameType

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_args

PASSED_ON = (signal.SIGINT, signal.SIGTERM)
STOPPED_BY_SIGNAL = 128 + signal.SIGTERM
# Codes that say more than "it crashed", the most telling first; a worker's 143 may be only the agent's clearing up.
TELLING_CODES = (3, 2)


def summarise_exit_codes(codes: Iterable[int]) -> int:
    """Choose one exit code for a group of workers; negative codes are deaths by signal, as ``subprocess`` has it.

    Returns:
        0 when all are 0; else 3 or 2 if any worker said so; else the first crash; else 143.
    """
    failed = [128 - code if code < 0 else code for code in codes if code != 0]
    for telling in TELLING_CODES:
        if telling in failed:
            return telling
    crashed = [code for code in failed if code != STOPPED_BY_SIGNAL]
    return next(iter(crashed or failed), 0)


def build_agent(config: LaunchConfig, command: str, arguments: Sequence[str]) -> LocalElasticAgent:
    """Build the agent that torchrun would build, from torchrun's own options."""
    rendezvous = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    is_static = config.rdzv_backend == "static"
    address, _, port = config.rdzv_endpoint.rpartition(":") if is_static else ("", "", "")
    spec = WorkerSpec(
        role="rank",
        local_world_size=config.nproc_per_node,
        entrypoint=command,
        args=tuple(arguments),
        rdzv_handler=rendezvous_registry.get_rendezvous_handler(rendezvous),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=address or None,
        master_port=int(port) if port else None,
        local_addr=config.local_addr,
    )
    assert config.logs_specs is not None  # LaunchConfig fills it in
    return LocalElasticAgent(spec=spec, logs_specs=config.logs_specs)


def pass_signals_on(agent: LocalElasticAgent) -> None:
    """Hand SIGINT and SIGTERM to the workers, which live in sessions of their own, and keep waiting for them."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        process_ids = [worker.id for worker in agent.get_worker_group().workers]
        if not all(isinstance(process_id, int) for process_id in process_ids):
            sys.exit(128 + number)  # still gathering: no worker of ours runs yet
        for process_id in process_ids:
            try:
                os.kill(process_id, number)
            except ProcessLookupError:
                continue

    for number in PASSED_ON:
        signal.signal(number, pass_on)


def report(failures: dict[int, ProcessFailure], exit_code: int) -> None:
    """Name the ranks that crashed; ranks that stopped with a code of ours have said why themselves."""
    if exit_code in (0, *TELLING_CODES, STOPPED_BY_SIGNAL):
        return
    for rank, failure in sorted(failures.items()):
        fate = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        print(f"rank {rank} (pid {failure.pid}) ended with {fate}", file=sys.stderr)
    print("the first traceback above, and logs/ in the run's output folder, hold the cause", file=sys.stderr)


def main(arguments: list[str]) -> int:
    """Launch as ``torchrun ARGUMENTS`` would and return the workers' exit code."""
    options = parse_args(arguments)
    is_single_node = options.nnodes in ("1", "1:1") and not options.rdzv_endpoint
    if is_single_node:
        # Any free port, a name of its own: two runs on one machine do not meet.
        options.nnodes, options.rdzv_backend = "1", "c10d"
        options.rdzv_endpoint, options.rdzv_id = "localhost:0", str(uuid.uuid4())
    # Ranks write their own log files; the agent's would be a temporary folder per start.
    options.log_dir = options.log_dir or os.devnull
    # The agent installs its handlers over these signals only; the others are ours.
    options.signals_to_handle = "SIGHUP,SIGQUIT"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = options.signals_to_handle
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    config, command, worker_arguments = config_from_args(options)
    agent = build_agent(config, str(command), worker_arguments)
    pass_signals_on(agent)
    try:
        result = agent.run()
    except SignalException as stop:
        return 128 + stop.sigval
    exit_code = summarise_exit_codes(failure.exitcode for failure in result.failures.values())
    report(result.failures, exit_code)
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
