#!/usr/bin/env bash
# Run every check and the whole test suite: ./run_tests.sh [words for pytest ...]
#
# Makes .venv and installs on the first start. With words for pytest (-k name, a path, -x ...) only pytest runs, in one
# process unless they say -n.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/setup.sh
set_up_environment test,dev

if [ $# -eq 0 ]; then
    scripts/check.sh --static
fi
# One thread a process: the tests start up to eight ranks at once.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ $# -eq 0 ]; then
    # Ranks wait for one another half of the time. Tests of one file stay together, as they share ranks and references.
    set -- --numprocesses auto --maxprocesses 4 --dist loadfile
fi
exec .venv/bin/python -m pytest "$@"
