"""The page on which workers record their progress: how it is read, and that nonsense reads as None."""

from __future__ import annotations

import gc
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.control.link import progress_page
from holdfast.control.link.progress_page import SLOT_BYTES, ProgressPage, ProgressWriter, open_progress
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.messages.progress import Activity

ME = os.getpid()


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    made = ProgressPage(3)
    yield made
    made.close()


@contextmanager
def memory_of(page: ProgressPage) -> Iterator[mmap.mmap]:
    """Map the page writable, as any process that has opened it can."""
    opened = os.open(page.path, os.O_RDWR)
    try:
        with mmap.mmap(opened, 3 * SLOT_BYTES) as memory:
            yield memory
    finally:
        os.close(opened)


def test_the_progress_of_a_worker_is_read_only_from_its_own_slot(page: ProgressPage) -> None:
    writer = ProgressWriter(page.path, 1)
    writer.set_position(7, 41, 4)
    writer.start_activity(Activity.COMPUTE, 3)
    reading = page.read(1, ME)
    assert reading is not None
    assert (reading.generation, reading.step, reading.world) == (7, 41, 4)
    assert (reading.activity, reading.micro_batch, reading.waits_since) == (Activity.COMPUTE, 3, None)
    assert (page.read(0, ME), page.read(2, ME)) == (None, None)


def test_the_page_records_the_end_of_a_wait_and_the_link_rate(page: ProgressPage) -> None:
    writer = ProgressWriter(page.path, 0)
    writer.start_activity(Activity.REDUCING)
    writer.start_wait("all_to_all", 4, 100)
    waiting, account = page.read(0, ME), page.read_account(0, ME)
    assert waiting is not None
    assert waiting.waits_since == waiting.looked > 0.0
    assert account is not None
    assert account.link_bytes_per_s == 0.0
    writer.end_wait()
    writer.set_link_rate(2.5e9)
    after, account = page.read(0, ME), page.read_account(0, ME)
    assert after is not None
    assert (after.waits_since, after.since) == (None, waiting.since)
    assert after.looked >= waiting.looked
    assert account is not None
    assert account.link_bytes_per_s == 2.5e9


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0])
def test_an_invalid_link_rate_reads_as_zero(page: ProgressPage, nonsense: float) -> None:
    writer = ProgressWriter(page.path, 0)
    writer.set_link_rate(nonsense)
    account = page.read_account(0, ME)
    assert account is not None
    assert account.link_bytes_per_s == 0.0


def test_a_new_position_becomes_visible_only_with_its_activity(page: ProgressPage) -> None:
    writer = ProgressWriter(page.path, 0)
    writer.set_position(1, 1, 2)
    writer.start_activity(Activity.REDUCING)
    before = page.read(0, ME)
    writer.set_position(1, 2, 2)
    assert page.read(0, ME) == before


def test_progress_written_by_another_process_is_visible(page: ProgressPage) -> None:
    code = (
        "import sys; from holdfast.control.link.progress_page import ProgressWriter\n"
        "from holdfast.protocol.messages.progress import Activity\n"
        "writer = ProgressWriter(sys.argv[1], 2); writer.set_position(5, 9, 3); writer.start_activity(Activity.VOTED)\n"
        "print(__import__('os').getpid())"
    )
    done = subprocess.run([sys.executable, "-c", code, page.path], capture_output=True, text=True, check=True)
    reading = page.read(2, int(done.stdout))
    assert reading is not None
    assert (reading.step, reading.activity) == (9, Activity.VOTED)


def test_a_concurrent_store_never_reads_as_a_zero_time(page: ProgressPage) -> None:
    """A store must not show zeros for a moment, which would read as a very old check."""
    code = (
        "import sys; from holdfast.control.link.progress_page import ProgressWriter\n"
        "writer = ProgressWriter(sys.argv[1], 2); writer.start_wait('vote', 4, 8); print('up', flush=True)\n"
        "while True: writer.renew_wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code, page.path], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        read = [page.read(2, writer.pid) for _ in range(50_000)]
        writer.kill()
    looked = [one.looked - one.waits_since for one in read if one is not None and one.waits_since is not None]
    assert len(looked) > 10_000
    assert min(looked) >= 0.0


def test_the_page_works_without_dev_shm() -> None:
    """In this mount namespace /dev/shm is read-only, as in a container that lacks it."""
    code = (
        "import os; from holdfast.control.link.progress_page import ProgressPage, ProgressWriter\n"
        "from holdfast.protocol.messages.progress import Activity\n"
        "assert not os.access('/dev/shm/.', os.W_OK) or not os.statvfs('/dev/shm').f_blocks\n"
        "page = ProgressPage(1); writer = ProgressWriter(page.path, 0)\n"
        "writer.set_position(5, 9, 3); writer.start_activity(Activity.COMPUTE, 1)\n"
        "print(page.read(0, os.getpid()).step)"
    )
    hide = 'mount -t tmpfs -o ro none /dev/shm && exec "$0" -c "$1"'
    done = subprocess.run(["unshare", "-m", "sh", "-c", hide, sys.executable, code], capture_output=True, text=True)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.stdout == "9\n", done.stderr


def test_data_of_an_earlier_process_is_ignored(page: ProgressPage) -> None:
    ProgressWriter(page.path, 0).start_activity(Activity.COMPUTE, 1)
    assert page.read(0, ME + 1) is None
    assert page.read_account(0, ME + 1) is None


def test_a_wait_lasts_until_it_has_ended(page: ProgressPage) -> None:
    writer = ProgressWriter(page.path, 0)
    writer.start_wait("all_to_all", 4, 4096)
    reading = page.read(0, ME)
    assert reading is not None
    assert reading.waits_since is not None
    assert reading.looked == reading.waits_since
    writer.renew_wait()
    later = page.read(0, ME)
    assert later is not None
    assert later.looked > reading.looked
    writer.end_wait()
    over = page.read(0, ME)
    assert over is not None
    assert over.waits_since is None


def test_the_newest_four_waits_are_kept_oldest_first(page: ProgressPage) -> None:
    writer = ProgressWriter(page.path, 0)
    for number in range(6):
        writer.start_wait(f"operation {number}", 4, number)
        if number < 5:
            writer.end_wait()
    account = page.read_account(0, ME)
    assert account is not None
    assert [(wait.what, wait.bytes) for wait in account.waits] == [(f"operation {n}", n) for n in (2, 3, 4, 5)]
    assert [wait.until is None for wait in account.waits] == [False, False, False, True]


def test_totals_contain_the_count_and_duration_of_ended_activities(page: ProgressPage) -> None:
    writer = ProgressWriter(page.path, 0)
    for micro_batch in range(3):
        writer.start_activity(Activity.COMPUTE, micro_batch)
    account = page.read_account(0, ME)
    assert account is not None
    total = account.totals[Activity.COMPUTE]
    assert total.count == 2
    assert 0.0 < total.longest_s <= total.sum_s
    assert Activity.REDUCING not in account.totals


def test_a_long_pause_reason_is_truncated(page: ProgressPage) -> None:
    writer = ProgressWriter(page.path, 0)
    writer.start_pause("evaluation of " + "a" * 200)
    account = page.read_account(0, ME)
    assert account is not None
    assert account.reason == "evaluation of " + "a" * 50
    assert writer.current_activity == (Activity.PAUSED, -1)


def test_a_slot_reads_as_none_during_a_store(page: ProgressPage) -> None:
    writer = ProgressWriter(page.path, 0)
    with memory_of(page) as memory:
        struct.pack_into("<Q", memory, 0, 99)
        assert page.read(0, ME) is None
        writer.start_activity(Activity.COMPUTE)
        assert page.read(0, ME) is not None


@pytest.mark.parametrize("offset", [24, 56, 64])
@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0, 1e300])
def test_invalid_times_read_as_none(page: ProgressPage, offset: int, nonsense: float) -> None:
    ProgressWriter(page.path, 0)
    with memory_of(page) as memory:
        struct.pack_into("<d", memory, offset, nonsense)
    assert page.read(0, ME) is None


def test_reading_arbitrary_bytes_does_not_fail(page: ProgressPage) -> None:
    with memory_of(page) as memory:
        for fill in (b"\xff", b"\x01", b"\x7f"):
            memory[:SLOT_BYTES] = fill * SLOT_BYTES
            pid = struct.unpack_from("<I", memory, 32)[0]
            page.read(0, pid)
            assert page.read_account(0, pid) is not None


def test_a_slot_beyond_the_last_worker_is_refused(page: ProgressPage) -> None:
    with pytest.raises(OSError, match="no room for worker 3"):
        ProgressWriter(page.path, 3)


def test_closing_the_page_removes_its_file(page: ProgressPage) -> None:
    writer = ProgressWriter(page.path, 0)
    other = ProgressPage(1)
    path = other.path
    other.close()
    with pytest.raises(OSError, match="No such file"):
        ProgressWriter(path, 0)
    writer.start_activity(Activity.COMPUTE)  # A process that has opened its own page keeps it.


def test_moved_bytes_are_summed_for_one_process_only(page: ProgressPage) -> None:
    writer = ProgressWriter(page.path, 1)
    writer.add_moved_bytes(100, 0)
    writer.add_moved_bytes(20, 7)
    assert page.read_moved_bytes(1, ME) == (120, 7)
    assert page.read_moved_bytes(1, ME + 1) == page.read_moved_bytes(0, ME) == (0, 0)
    ProgressWriter(page.path, 1)
    assert page.read_moved_bytes(1, ME) == (0, 0), "the next process has not moved yet"


def test_an_impossibly_large_number_of_moved_bytes_reads_as_zero(page: ProgressPage) -> None:
    writer = ProgressWriter(page.path, 1)
    writer.add_moved_bytes(1 << 61, 5)
    assert page.read_moved_bytes(1, ME) == (0, 0)


def test_running_full_garbage_collections_are_counted(page: ProgressPage) -> None:
    def collected_s() -> float:
        reading = page.read(0, ME)
        assert reading is not None
        return reading.collected_s

    writer = ProgressWriter(page.path, 0)
    writer.on_collection("stop", {"generation": 2})  # The collection began before the page existed.
    writer.on_collection("start", {"generation": 1})
    time.sleep(0.01)
    assert collected_s() == 0.0
    writer.on_collection("start", {"generation": 2})
    time.sleep(0.01)
    running_s = collected_s()
    assert running_s >= 0.01
    writer.on_collection("stop", {"generation": 2})
    assert (after_s := collected_s()) >= running_s
    time.sleep(0.01)
    assert collected_s() == after_s


def test_the_garbage_collections_of_a_worker_are_on_its_page(
    page: ProgressPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_page, "dump_stacks_on_signal", lambda path: None)
    slot = open_progress(WorkerSettings(spec=JobSpec(script="x.py"), socket="", worker="n0/0/a", progress=page.path))
    assert isinstance(slot, ProgressWriter)
    gc.collect()
    try:
        reading = page.read(0, ME)
        assert reading is not None
        assert reading.collected_s > 0.0
    finally:
        gc.callbacks.remove(slot.on_collection)
