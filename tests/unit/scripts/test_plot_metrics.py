import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "plot_metrics.py"
PNG_SIGNATURE = b"\x89PNG"


def write_run(folder, losses):
    folder.mkdir()
    lines = [json.dumps({"step": i, "loss": x, "tokens_per_second": 10.0}) for i, x in enumerate(losses, start=1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def plot(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_several_runs_become_one_picture(tmp_path):
    write_run(tmp_path / "a", [5.0, 4.0, None, 3.0])
    write_run(tmp_path / "b", [5.0])
    (tmp_path / "a" / "eval.jsonl").write_text('{"step": 2, "loss": 4.2}\n{"step": 3, "lo')
    done = plot(tmp_path / "a", tmp_path / "b" / "metrics.jsonl", "--out", tmp_path / "new" / "curves.png")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(PNG_SIGNATURE)


def test_a_folder_that_is_no_run_is_named(tmp_path):
    done = plot(tmp_path, "--out", tmp_path / "curves.png")
    assert done.returncode == 2
    assert f"{tmp_path} is no run: it has no metrics.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_without_a_step_is_named(tmp_path):
    write_run(tmp_path / "a", [])
    done = plot(tmp_path / "a", "--out", tmp_path / "curves.png")
    assert done.returncode == 2
    assert "holds no step yet" in done.stderr
