import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "measure_offload.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("measure_offload", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["measure_offload"] = module
    spec.loader.exec_module(module)
    return module


def test_copies_are_counted_by_direction(script, tmp_path):
    events = [
        {"name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 3}},
        {"name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": 4}},
        {"name": "Memcpy DtoD (Device -> Device)", "args": {"bytes": 9}},
        {"name": "aten::copy_"},
        {"ph": "M"},
    ]
    trace = tmp_path / "rank_0.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    assert script.count_copies(trace, "HtoD") == script.Copies(2, 7)
    assert script.count_copies(trace, "DtoH") == script.Copies(0, 0)


def test_without_an_accelerator_it_says_so_and_starts_nothing(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "count_accelerators", lambda: 0)
    assert script.main(["no_such_job.yaml"]) == 2
    assert "no accelerator" in capsys.readouterr().err


def test_offload_that_saves_or_copies_nothing_is_a_disappointment(script):
    none, some = script.Copies(0, 0), script.Copies(5, 50)
    without = script.Footprint(100, none, none, 1.0)
    assert script.find_disappointments(without, script.Footprint(40, some, some, 1.0)) == []
    assert len(script.find_disappointments(without, script.Footprint(100, none, none, 1.0))) == 3
