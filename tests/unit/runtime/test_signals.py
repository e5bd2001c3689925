import os
import signal
import subprocess
import sys

import pytest

from torchtrain.runtime.signals import StopSignal


def test_nothing_received_at_first():
    with StopSignal() as stop:
        assert stop.received is None


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_is_noted_and_not_obeyed(signum):
    with StopSignal() as stop:
        stop.defer()
        os.kill(os.getpid(), signum)
        assert stop.received is signum


def test_a_second_interrupt_interrupts():
    with StopSignal() as stop:
        stop.defer()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.received is signal.SIGINT


def test_a_second_sigterm_is_noted_only():
    with StopSignal() as stop:
        stop.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received is signal.SIGTERM


def test_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        stop.defer()
        os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_signal_says_that_it_came(capfd):
    with StopSignal("[rank 3] ") as stop:
        stop.defer()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert (
        capfd.readouterr().err
        == "[rank 3] SIGTERM: saving and leaving after this step, or this batch of an evaluation\n"
    )


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_before_there_is_anything_to_save_a_signal_ends_the_process_even_inside_c(signum):
    # A mutex locked twice stands for a rendezvous: no signal ends the wait, so Python gets no chance to run a handler.
    code = (
        "import ctypes; from torchtrain.runtime.signals import StopSignal\n"
        "with StopSignal():\n"
        "    print('waiting', flush=True)\n"
        "    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "    libc.pthread_mutex_lock(mutex)\n"
        "    libc.pthread_mutex_lock(mutex)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signum)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 143
    assert said == f"{signum.name}: leaving at once, nothing to save yet\n"
