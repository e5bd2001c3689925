import os
import signal

import pytest

from torchtrain.runtime.signals import StopSignal


def test_nothing_received_at_first():
    with StopSignal() as stop:
        assert stop.received is None


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_is_noted_and_not_obeyed(signum):
    with StopSignal() as stop:
        os.kill(os.getpid(), signum)
        assert stop.received is signum


def test_a_second_interrupt_interrupts():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.received is signal.SIGINT


def test_a_second_sigterm_is_noted_only():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received is signal.SIGTERM


def test_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal():
        os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
