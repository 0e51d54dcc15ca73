"""The reaper's thread destroys an abandoned group once its operations have ended, and never before."""

import subprocess
import sys
import threading

from holdfast.runtime.groups.abandoned_groups import GroupReaper

DEADLINE_S = 60.0


class FakeGroup:
    def __init__(self) -> None:
        self.over = threading.Event()
        self.looked = threading.Event()
        self.destroyed = threading.Event()
        self.destroyed_by: threading.Thread | None = None
        self.early = False

    def has_ended(self) -> bool:
        self.looked.set()
        return self.over.is_set()

    def destroy(self) -> None:
        self.early = not self.over.is_set()
        self.destroyed_by = threading.current_thread()
        self.destroyed.set()


def test_abandoned_groups_are_destroyed_only_after_their_operations_end():
    reaper = GroupReaper()
    slow, quick = FakeGroup(), FakeGroup()
    reaper.add(slow)
    assert slow.looked.wait(DEADLINE_S)
    quick.over.set()
    reaper.add(quick)
    assert quick.destroyed.wait(DEADLINE_S), "a group that has not ended must not delay the others"
    assert not slow.destroyed.is_set()
    slow.over.set()
    assert reaper.wait_empty(DEADLINE_S)
    assert slow.destroyed_by is not None
    assert slow.destroyed_by is not threading.current_thread()
    assert not slow.early
    assert reaper.size == 0
    assert reaper.added == 2
    assert reaper.close(DEADLINE_S)
    assert not any(thread.name == "holdfast-reaper" for thread in threading.enumerate())


def test_close_reports_remaining_groups_and_ends_the_thread():
    reaper = GroupReaper()
    reaper.add(FakeGroup())
    assert not reaper.close(0.01)
    assert reaper.size == 1
    late = FakeGroup()
    reaper.add(late)
    assert reaper.size == 2
    assert not late.destroyed.is_set()
    assert not any(thread.name == "holdfast-reaper" for thread in threading.enumerate())


def test_a_lingering_group_is_destroyed_at_its_time_or_at_close():
    reaper = GroupReaper()
    brief, long = FakeGroup(), FakeGroup()
    brief.over.set()
    long.over.set()
    reaper.add(long, linger_s=1e6)
    reaper.add(brief, linger_s=0.01)
    assert brief.destroyed.wait(DEADLINE_S)
    assert not long.destroyed.is_set()
    assert reaper.close(DEADLINE_S)
    assert long.destroyed.is_set()


def test_an_unused_reaper_has_no_thread():
    reaper = GroupReaper()
    assert reaper.close(0.0)
    assert not any(thread.name == "holdfast-reaper" for thread in threading.enumerate())


def test_groups_that_remain_at_exit_are_never_freed():
    script = """
from holdfast.runtime.groups.abandoned_groups import GroupReaper
class Abandoned:
    def has_ended(self): return False
    def destroy(self): print("destroyed")
    def __del__(self): print("freed")
reaper = GroupReaper()
reaper.add(Abandoned())
print(reaper.close(0.0))
del reaper
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout == "False\n"
