# Sourced by run_train.sh, run_tests.sh and scripts/check.sh: finds a Python, makes .venv and installs into it.
#
#   set_up_environment [EXTRAS]     e.g. set_up_environment "test,dev"
#
# Costs nothing when .venv already holds what pyproject.toml asks for. Two starts at once are safe (a lock that the
# kernel drops with its owner), and so is a start that was killed half-way (the next one rebuilds the environment).

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 python; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    echo "torchtrain needs Python 3.11 or newer with its venv module (on Debian: apt install python3-venv)." >&2
    echo "Install one, or name it: PYTHON=/path/to/python3.11 $0" >&2
    return 2
}

set_up_environment() {
    local extras="${1:-}" wanted stamp python
    wanted="$(cksum <pyproject.toml) $PWD"
    # A stamp per set of extras. Installing the tests' extras also installs the core, never the other way round.
    for stamp in ".venv/.installed-${extras:-core}" .venv/.installed-test,dev; do
        if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
            return 0
        fi
    done
    python="$(find_python)" || return $?
    "$python" scripts/bootstrap.py --extras "$extras" --stamp "$wanted"
}
