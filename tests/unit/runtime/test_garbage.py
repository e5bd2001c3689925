import gc
import weakref

from torchtrain.runtime.garbage import GarbageSchedule


class Node:
    def __init__(self):
        self.me = self


def test_garbage_is_collected_on_the_schedule_only():
    schedule = GarbageSchedule(10)
    try:
        assert not gc.isenabled()
        alive = weakref.ref(Node())
        schedule.collect_on(9)
        assert alive() is not None
        schedule.collect_on(10)
        assert alive() is None
    finally:
        schedule.close()
    assert gc.isenabled()


def test_interval_zero_leaves_python_alone():
    GarbageSchedule(0).collect_on(0)
    assert gc.isenabled()
