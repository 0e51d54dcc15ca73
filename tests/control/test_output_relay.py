"""Worker output reaches the terminal and the log files line by line, however a worker writes it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.control.output_relay import MAX_LINE, TAIL_LINES, OutputRelay, Which, split_lines

DEADLINE_S = 60.0
W0, W1 = "n0/0/aa", "n0/1/bb"

MakeRelay = Callable[..., OutputRelay]


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[MakeRelay]:
    made: list[OutputRelay] = []

    def make(which: Which = "all", *, places: int = 1) -> OutputRelay:
        made.append(OutputRelay("n0", str(tmp_path), log_folder=str(tmp_path / "logs"), which=which, places=places))
        return made[-1]

    (tmp_path / "logs").mkdir()
    yield make
    for one in made:
        one.close(DEADLINE_S)


def process(relay: OutputRelay, worker: str) -> tuple[int, int]:
    """Return the stdout and stderr descriptors of a worker process."""
    out, err = relay.open(worker)
    return os.open(out, os.O_WRONLY), os.open(err, os.O_WRONLY)


def prints(relay: OutputRelay, worker: str, *lines: str, failed: bool | None = False) -> None:
    """Print lines as a worker process that then ends; with `failed` None, its end is not reported."""
    streams = process(relay, worker)
    for number, line in enumerate(lines):
        os.write(streams[number % 2], line.encode())
    for stream in streams:
        os.close(stream)
    if failed is not None:
        relay.on_ended(worker, failed=failed)


def test_lines_are_printed_with_the_node_name_on_their_stream_and_logged(
    relay: MakeRelay, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = relay()
    prints(one, W0, "to stdout\nand more", "to stderr\n")
    one.close(DEADLINE_S)
    captured = capfd.readouterr()
    assert captured.out == "[n0] to stdout\n[n0] and more\n"
    assert captured.err == "[n0] to stderr\n"
    kept = (tmp_path / "logs" / "n0.0.log").read_text().splitlines()
    assert sorted(kept) == ["and more", "to stderr", "to stdout"]
    assert list(tmp_path.iterdir()) == [tmp_path / "logs"]


def test_a_log_spans_restarts_and_lines_carry_local_ranks(
    relay: MakeRelay, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = relay(places=2)
    prints(one, W0, "before\n", failed=True)
    prints(one, W1, "another\n")
    prints(one, "n0/0/cc", "after\n")
    one.close(DEADLINE_S)
    assert (tmp_path / "logs" / "n0.0.log").read_text() == "before\nafter\n"
    assert sorted(capfd.readouterr().out.splitlines()) == ["[n0.0] after", "[n0.0] before", "[n0.1] another"]


def test_output_of_rank_0_from_before_its_rank_assignment_is_printed(
    relay: MakeRelay, capfd: pytest.CaptureFixture[str]
) -> None:
    one = relay("rank0", places=2)
    streams = {worker: process(one, worker) for worker in (W0, W1)}
    for worker, (out, _) in streams.items():
        os.write(out, f"{worker} begins\n".encode())
    one.on_plan(1, W1)
    one.on_generation(1)
    for worker, (out, _) in streams.items():
        os.write(out, f"{worker} trains\n".encode())
    for worker, both in streams.items():
        for stream in both:
            os.close(stream)
        one.on_ended(worker, failed=False)
    one.close(DEADLINE_S)
    assert capfd.readouterr().out.splitlines() == ["[n0.1] n0/1/bb begins", "[n0.1] n0/1/bb trains"]


def test_only_the_last_lines_of_a_failed_worker_are_printed(
    relay: MakeRelay, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = relay("failed")
    prints(one, W0, "".join(f"line {number}\n" for number in range(100)), failed=True)
    prints(one, "n0/0/cc", "all is well\n")
    one.close(DEADLINE_S)
    assert capfd.readouterr().out.splitlines() == [f"[n0] line {n}" for n in range(100 - TAIL_LINES, 100)]
    assert len((tmp_path / "logs" / "n0.0.log").read_text().splitlines()) == 101


def test_a_blocked_terminal_does_not_block_the_agent(relay: MakeRelay) -> None:
    """The terminal blocks: the relay's thread waits, the agent's thread does not."""
    one = relay()
    held, reader = threading.Event(), threading.Event()

    def hold() -> None:
        reader.set()
        held.wait(DEADLINE_S)

    one._post(hold)
    assert reader.wait(DEADLINE_S)
    prints(one, W0, "late\n")
    one.on_plan(1, W0)
    one.on_generation(1)
    held.set()


def test_closing_does_not_wait_for_a_worker_that_never_opened_its_streams(tmp_path: Path) -> None:
    one = OutputRelay("n0", str(tmp_path))
    one.open(W0)
    one.close(0.1)
    one.on_ended(W0, failed=True)


@pytest.mark.parametrize(
    ("data", "at_end", "lines"),
    [
        (b"one\ntwo", False, [b"one\n", b"two"]),
        (b"one\ntwo", True, [b"one\n", b"two\n", b""]),
        (b"\r 10%\r 20%\r\n", False, [b" 10%\n", b" 20%\n", b""]),
        (b"half\r", False, [b"half\r"]),
        (b"\n\n", False, [b"\n", b"\n", b""]),
        (b"x" * MAX_LINE, False, [b"x" * MAX_LINE + b"\n", b""]),
        (b"", True, [b""]),
    ],
)
def test_output_is_split_into_lines(data: bytes, at_end: bool, lines: list[bytes]) -> None:
    assert split_lines(data, at_end=at_end) == lines


def test_lines_lost_on_a_full_disk_are_counted_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The relay drops the lines and reports their number, so a full disk fails no worker."""
    lost: list[tuple[str, str]] = []
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "n0.0.log"
    relay = OutputRelay(
        "n0", str(tmp_path), log_folder=str(log.parent), on_lost=lambda file, why: lost.append((file, why))
    )
    out, err = process(relay, W0)
    full, real = threading.Event(), os.write

    def write(number: int, data: bytes) -> int:
        if full.is_set() and os.path.samestat(os.fstat(number), log.stat()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(number, data)

    monkeypatch.setattr(os, "write", write)
    shown = ""
    for number, line in enumerate(("first", "lost", "lost too", "last")):
        (full.set if number in (1, 2) else full.clear)()
        os.write(out, f"{line}\n".encode())
        while line not in shown:
            shown += capfd.readouterr().out
    os.close(out)
    os.close(err)
    relay.on_ended(W0, failed=False)
    relay.close(DEADLINE_S)
    assert lost == [(str(log), os.strerror(errno.ENOSPC))]
    missing = f"[holdfast: 2 lines are missing here: {os.strerror(errno.ENOSPC)}]"
    assert log.read_text().splitlines() == ["first", "", missing, "last"]


def test_a_worker_starts_even_if_its_log_cannot_be_opened(tmp_path: Path) -> None:
    """A log that cannot be opened must not make the agent retry the start forever."""
    lost: list[str] = []
    relay = OutputRelay(
        "n0", str(tmp_path), log_folder=str(tmp_path / "none"), which="none", on_lost=lambda file, _: lost.append(file)
    )
    for worker in (W0, "n0/0/cc"):
        prints(relay, worker, "said\n")
    relay.close(DEADLINE_S)
    assert lost == [str(tmp_path / "none" / "n0.0.log")]


def test_output_that_is_not_printed_is_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    relay = OutputRelay("n0", str(tmp_path), log_folder=str(tmp_path), which="none")
    prints(relay, W0, "said\n", failed=True)
    relay.close(DEADLINE_S)
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "n0.0.log").read_text() == "said\n"
