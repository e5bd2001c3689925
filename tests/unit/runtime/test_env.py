import pytest

from torchtrain.errors import ConfigError
from torchtrain.runtime.env import LaunchEnv, read_intended_ranks, read_launch_env

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_without_a_launcher_there_is_one_rank():
    assert read_launch_env({}) == LaunchEnv(0, 0, 1, is_launched=False)


def test_intended_ranks_are_a_launchers_or_those_of_the_script():
    assert read_intended_ranks({}) is None
    assert read_intended_ranks({"NGPU": "4"}) == 4
    assert read_intended_ranks({**TORCHRUN, "NGPU": "4"}) == 8
    with pytest.raises(ConfigError, match="NGPU = 'four'"):
        read_intended_ranks({"NGPU": "four"})


def test_torchrun_variables_are_read():
    assert read_launch_env(TORCHRUN) == LaunchEnv(5, 1, 8, is_launched=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "first"), ("RANK", "8"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "4"), ("LOCAL_RANK", "")],
)
def test_a_malformed_value_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        read_launch_env({**TORCHRUN, name: value})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_launch_is_refused(name):
    with pytest.raises(ConfigError, match=name):
        read_launch_env({key: value for key, value in TORCHRUN.items() if key != name})


def test_all_faults_are_reported_at_once():
    with pytest.raises(ConfigError) as raised:
        read_launch_env({"RANK": "x", "WORLD_SIZE": "y"})
    assert {fault.path for fault in raised.value.faults} == {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
