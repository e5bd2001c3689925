#!/usr/bin/env bash
# The checks of every commit, in about a minute: style, types, floors, quick tests.
#
#   scripts/check.sh            all of them
#   scripts/check.sh --static   without the tests
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup.sh
set_up_environment test,dev
bin=.venv/bin

echo "== ruff" && $bin/ruff check . && $bin/ruff format --check .
echo "== pyrefly" && $bin/pyrefly check
echo "== import-linter" && $bin/lint-imports
if [ "${1:-}" != --static ]; then
    echo "== quick tests"
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" $bin/python -m pytest -q -m "not slow" tests/unit tests/architecture
fi
