"""What is buried is destroyed once it has ended, in the graveyard's thread, and never before."""

import subprocess
import sys
import threading

from holdfast.runtime.groups.graveyard import Graveyard

DEADLINE_S = 60.0


class FakeRemains:
    def __init__(self) -> None:
        self.over = threading.Event()
        self.looked = threading.Event()
        self.destroyed = threading.Event()
        self.destroyed_by: threading.Thread | None = None
        self.early = False

    def ended(self) -> bool:
        self.looked.set()
        return self.over.is_set()

    def destroy(self) -> None:
        self.early = not self.over.is_set()
        self.destroyed_by = threading.current_thread()
        self.destroyed.set()


def test_remains_are_destroyed_once_ended_and_not_before():
    graveyard = Graveyard()
    slow, quick = FakeRemains(), FakeRemains()
    graveyard.bury(slow)
    assert slow.looked.wait(DEADLINE_S)
    quick.over.set()
    graveyard.bury(quick)
    assert quick.destroyed.wait(DEADLINE_S), "one that has not ended must not hold up the others"
    assert not slow.destroyed.is_set()
    slow.over.set()
    assert graveyard.wait_empty(DEADLINE_S)
    assert slow.destroyed_by is not None
    assert slow.destroyed_by is not threading.current_thread()
    assert not slow.early
    assert graveyard.size == 0
    assert graveyard.buried == 2
    assert graveyard.close(DEADLINE_S)
    assert not any(thread.name == "holdfast-graveyard" for thread in threading.enumerate())


def test_close_says_what_is_left_and_ends_the_thread():
    graveyard = Graveyard()
    graveyard.bury(FakeRemains())
    assert not graveyard.close(0.01)
    assert graveyard.size == 1
    late = FakeRemains()
    graveyard.bury(late)
    assert graveyard.size == 2
    assert not late.destroyed.is_set()
    assert not any(thread.name == "holdfast-graveyard" for thread in threading.enumerate())


def test_what_lingers_is_destroyed_at_its_time_or_when_the_graveyard_closes():
    graveyard = Graveyard()
    brief, long = FakeRemains(), FakeRemains()
    brief.over.set()
    long.over.set()
    graveyard.bury(long, linger_s=1e6)
    graveyard.bury(brief, linger_s=0.01)
    assert brief.destroyed.wait(DEADLINE_S)
    assert not long.destroyed.is_set()
    assert graveyard.close(DEADLINE_S)
    assert long.destroyed.is_set()


def test_an_unused_graveyard_has_no_thread():
    graveyard = Graveyard()
    assert graveyard.close(0.0)
    assert not any(thread.name == "holdfast-graveyard" for thread in threading.enumerate())


def test_what_is_left_at_exit_is_never_freed():
    script = """
from holdfast.runtime.groups.graveyard import Graveyard
class Remains:
    def ended(self): return False
    def destroy(self): print("destroyed")
    def __del__(self): print("freed")
graveyard = Graveyard()
graveyard.bury(Remains())
print(graveyard.close(0.0))
del graveyard
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout == "False\n"
