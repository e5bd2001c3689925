"""Make ``.venv`` and install this repository into it; the standard library only.

Not for users: ``scripts/setup.sh`` calls it when the stamp in ``.venv`` does not match ``pyproject.toml``.
"""

from __future__ import annotations

import argparse
import fcntl
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
# Present exactly while an installation runs: whoever finds it under the lock knows that the last one was killed.
UNFINISHED = ENVIRONMENT / ".installing"


def is_usable_environment() -> bool:
    """Whether ``.venv`` has a Python that is new enough, a pip, and no half-finished installation."""
    if UNFINISHED.exists() or not PYTHON.exists():
        return False
    probe = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    return subprocess.run([PYTHON, "-c", probe], capture_output=True, check=False).returncode == 0


def install(extras: str, lock_descriptor: int) -> None:
    """Install the repository in editable form, making the environment first where there is no usable one.

    pip inherits the lock: if this process alone is killed, the next start waits until the orphan is done.
    """
    if not is_usable_environment():
        print(f"creating {ENVIRONMENT} with {sys.executable}", flush=True)
        venv.EnvBuilder(with_pip=True, clear=True).create(ENVIRONMENT)
    UNFINISHED.touch()
    target = f"{ROOT}[{extras}]" if extras else str(ROOT)
    print("installing torchtrain and what it needs (minutes, once)", flush=True)
    command = [PYTHON, "-m", "pip", "install", "--quiet", "--editable", target]
    code = subprocess.run(command, check=False, pass_fds=(lock_descriptor,)).returncode
    # A pip that fails by itself, for want of a network for example, leaves an environment that the next start can use;
    # one that was killed (a negative code) does not.
    if code >= 0:
        UNFINISHED.unlink()
    if code != 0:
        raise subprocess.CalledProcessError(code, command)


def main() -> int:
    """Install under a lock, then leave the stamp that lets the next start skip all this."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", default="")
    parser.add_argument("--stamp", required=True)
    arguments = parser.parse_args()
    stamp = ENVIRONMENT / f".installed-{arguments.extras or 'core'}"
    # Any file of the repository serves as the lock; "r+" because NFS grants exclusive locks to writers only.
    with (ROOT / "pyproject.toml").open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another start is installing; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text().strip() == arguments.stamp:
            return 0
        try:
            install(arguments.extras, lock.fileno())
        except subprocess.CalledProcessError as error:
            print(f"the installation failed (exit code {error.returncode}); see pip's words above", file=sys.stderr)
            return 1
        stamp.write_text(arguments.stamp + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
