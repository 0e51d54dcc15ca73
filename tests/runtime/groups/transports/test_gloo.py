"""Real groups of real processes: results, abandoned operations, killed peers, halted builds, and no leaks."""

import itertools
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from holdfast.runtime.groups.communicator import Communicator, HaltedError, PeerLostError, Pending
from holdfast.runtime.groups.transports import gloo
from tests.harness.local_world import LocalWorld, Seat, WorldError, run_world

RANKS = 3
LARGE = 1 << 18


def uneven(source: int, target: int) -> int:
    return (source * 2 + target) % 4  # This includes zero-length parts.


def results_body(seat: Seat) -> int:
    communicator = seat.connect(1)
    rank, size = communicator.rank, communicator.size
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        even = torch.arange(size * 2, dtype=dtype) + 10 * rank
        output = torch.zeros(size * 2, dtype=dtype)
        communicator.wait(communicator.start_all_to_all(output, even))
        expected = [10 * peer + 2 * rank + i for peer in range(size) for i in range(2)]
        assert output.tolist() == expected
    sent = [uneven(rank, peer) for peer in range(size)]
    received = [uneven(peer, rank) for peer in range(size)]
    output = torch.full((sum(received), 2), -1.0)
    rows = [[float(rank), float(peer)] for peer in range(size) for _ in range(sent[peer])]
    source = torch.tensor(rows).view(-1, 2)
    communicator.wait(communicator.start_all_to_all(output, source, received, sent))
    assert output.tolist() == [[float(peer), float(rank)] for peer in range(size) for _ in range(received[peer])]
    for length in (1, LARGE):  # The two lengths gather in different ways.
        gathered = torch.zeros(size * length)
        communicator.wait(communicator.start_all_gather(gathered, torch.full((length,), float(rank))))
        assert gathered.view(size, length).eq(torch.arange(float(size))[:, None]).all()
        own = gathered.view(size, length)[rank]
        own.fill_(rank + 5.0)
        communicator.wait(communicator.start_all_gather(gathered, own))
        assert gathered.view(size, length).eq(torch.arange(float(size))[:, None] + 5.0).all()
    many = [torch.zeros(size) for _ in range(20)]
    for pending in [communicator.start_all_gather(output, torch.tensor([1.0 * i])) for i, output in enumerate(many)]:
        communicator.wait(pending)
    assert [output.tolist() for output in many] == [[1.0 * i] * size for i in range(20)]
    assert isinstance(communicator, gloo.GlooCommunicator)
    assert len(communicator.sockets[0].handles) == size - 1
    seat.meet()
    communicator.retire(sever=False)
    communicator.retire()
    with pytest.raises(HaltedError, match="retired"):
        communicator.start_all_gather(torch.zeros(size), torch.zeros(1))
    assert seat.reaper.wait_empty(60)
    return seat.reaper.added


def test_collectives_give_the_right_results():
    assert run_world(RANKS, results_body) == [1] * RANKS


def start(communicator: Communicator, kind: str) -> Pending:
    size = communicator.size
    if kind == "all_to_all":
        return communicator.start_all_to_all(torch.zeros(size * LARGE), torch.ones(size * LARGE))
    if kind == "uneven":
        splits = [LARGE] * size
        return communicator.start_all_to_all(torch.zeros(size * LARGE), torch.ones(size * LARGE), splits, splits)
    if kind == "all_gather":
        return communicator.start_all_gather(torch.zeros(size * LARGE), torch.ones(LARGE))
    return communicator.start_all_gather(torch.zeros(size * 5), torch.ones(5))


def abandon_body(seat: Seat, kinds: list[str]) -> int:
    """The last rank does not join; the halt alone must free the others, and the next group must work."""
    for generation, kind in enumerate(kinds, start=1):
        halt = threading.Event()
        communicator = seat.connect(generation, halt=halt, timeout_s=5.0)
        joins, pending = seat.rank != seat.size - 1, None
        if joins:
            pending = start(communicator, kind)
            threading.Timer(0.002, halt.set).start()
            with pytest.raises(HaltedError, match=f"generation {generation} was halted"):
                communicator.wait(pending)
        seat.meet()  # No rank severs before this, so severing frees no other rank.
        communicator.retire()
        if pending:
            with pytest.raises(PeerLostError, match="retired"):
                communicator.wait(pending)
        seat.meet()
    communicator = seat.connect(100)
    communicator.wait(start(communicator, "all_gather"))
    seat.meet()
    communicator.retire()
    # Operations that survive severing end by their own timeout.
    assert seat.reaper.wait_empty(60)
    return seat.reaper.added


def test_every_kind_of_collective_can_be_abandoned():
    kinds = ["all_to_all", "uneven", "all_gather", "commit"] * 2
    assert run_world(RANKS, abandon_body, kinds) == [len(kinds) + 1] * RANKS


def killed_body(seat: Seat) -> str:
    halt = threading.Event()
    communicator = seat.connect(1, halt=halt, timeout_s=5.0)
    seat.meet()
    if seat.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pending = start(communicator, "all_to_all")
    backstop = threading.Timer(60, halt.set)
    backstop.start()
    outcome = "completed"
    try:
        communicator.wait(pending)
    except PeerLostError as error:
        outcome = str(error)
    communicator.retire()
    backstop.cancel()
    assert seat.reaper.wait_empty(60)
    return outcome


def test_a_killed_peer_fails_the_operation():
    outcomes = run_world(RANKS, killed_body)
    assert outcomes[1] is None
    assert all("all_to_all in generation 1 failed" in outcomes[rank] for rank in (0, 2))


def severed_body(seat: Seat) -> str:
    communicator = seat.connect(1, timeout_s=20.0)
    seat.meet()
    outcome = "severs"
    if seat.rank == 0:
        communicator.sever()
    else:
        with pytest.raises(PeerLostError) as caught:
            communicator.wait(start(communicator, "all_to_all"))
        outcome = str(caught.value)
    seat.meet()
    communicator.retire()
    assert seat.reaper.wait_empty(60)
    return outcome


def test_severing_fails_the_operations_of_peers():
    outcomes = run_world(RANKS, severed_body)
    assert all("all_to_all in generation 1 failed" in outcome for outcome in outcomes[1:])


def lonely_body(seat: Seat, how: str) -> str:
    if seat.rank != 0:
        seat.meet()
        return "absent"
    halt = threading.Event()
    if how == "halt":
        threading.Timer(0.01, halt.set).start()
    try:
        board = seat.board(1, halt=halt)
        communicator = gloo.build_gloo(
            board,
            0,
            2,
            generation=1,
            reaper=seat.reaper,
            halt=halt,
            build_timeout_s=60.0 if how == "halt" else 0.05,
        )
        outcome = f"built {communicator}"
    except (HaltedError, PeerLostError) as error:
        outcome = f"{type(error).__name__}: {error}"
    assert seat.reaper.wait_empty(60)
    seat.meet()
    return outcome


def test_a_halt_ends_the_build_of_a_group_with_a_missing_peer():
    assert run_world(2, lonely_body, "halt")[0] == "HaltedError: generation 1 was halted in rendezvous"


def test_the_build_of_a_group_with_a_missing_peer_times_out():
    outcome = run_world(2, lonely_body, "timeout")[0]
    assert outcome.startswith(
        "PeerLostError: the group of generation 1 could not be built: rendezvous of generation 1: '1:0/1' did"
    )


def vanished_body(seat: Seat, victim: int) -> tuple[str, float]:
    """The victim dies after it posted its address and before it connects."""
    board = seat.board(1)
    if seat.rank == victim:
        board.wait = lambda keys, timeout_s: os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        seat.connect(1, build_timeout_s=4.0)
    assert seat.reaper.wait_empty(60)
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("victim", [0, 2])
def test_a_peer_failure_during_the_build_fails_it_in_time(victim: int):
    for outcome in run_world(3, vanished_body, victim):
        if outcome is not None:
            assert "generation 1" in outcome[0]
            assert outcome[1] < 15.0, "gloo waits five times its timeout for a connection"


def footprint() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def reconfigured_body(seat: Seat, rounds: int) -> list[tuple[int, int]]:
    """Build, use and retire groups; every other one is severed during an operation."""
    footprints = []
    for generation in range(1, rounds + 1):
        halt = threading.Event()
        communicator = seat.connect(generation, halt=halt, timeout_s=5.0)
        communicator.wait(start(communicator, "all_gather"))
        if generation % 2 and seat.rank:
            pending = start(communicator, "all_to_all")
            halt.set()
            with pytest.raises(HaltedError):
                communicator.wait(pending)
        seat.meet()
        communicator.retire(sever=bool(generation % 2))
        assert seat.reaper.wait_empty(60)
        seat.meet()
        footprints.append(footprint())
    return footprints


def test_reconfigurations_leak_no_descriptor_and_no_thread():
    for footprints in run_world(2, reconfigured_body, 8):
        assert len(set(footprints[2:])) == 1, footprints


def forgetful_body(seat: Seat) -> str:
    """End with a group that has an operation which never ends."""
    halt = threading.Event()
    communicator = seat.connect(1, halt=halt, timeout_s=1000.0)
    if seat.rank == 0:
        pending = start(communicator, "all_to_all")
        halt.set()
        with pytest.raises(HaltedError):
            communicator.wait(pending)
    seat.meet()
    if seat.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    communicator.retire(sever=False)
    return str(seat.reaper.size)


def test_a_process_can_end_while_an_operation_hangs():
    with LocalWorld(2, forgetful_body) as world:
        assert world.results(ranks=[0], timeout_s=60) == ["1"]


def test_the_local_world_reports_errors_of_its_ranks():
    with pytest.raises(WorldError, match=r"rank 0 raised:[\s\S]*ZeroDivisionError"):
        run_world(1, lambda seat: 1 / 0)
    with pytest.raises(WorldError, match="exit code 3"):
        run_world(1, lambda seat: os._exit(3))


def waiting_body(seat: Seat, pipe: int) -> None:
    os.write(pipe, f"{os.getpid()} ".encode())
    threading.Event().wait()


def owner_of_a_world(pipe: int) -> None:
    with LocalWorld(2, waiting_body, pipe):
        threading.Event().wait()


def test_a_local_world_ends_when_its_owner_process_is_killed():
    reading, writing = os.pipe()
    owner = multiprocessing.get_context("fork").Process(target=owner_of_a_world, args=(writing,))
    owner.start()
    os.close(writing)
    received = b""
    while received.count(b" ") < 2:
        received += os.read(reading, 64)
    owner.kill()
    owner.join()
    assert os.read(reading, 1) == b"", "no process is left that could write"
    os.close(reading)


def hasty_body(seat: Seat) -> int:
    """Many orderly swaps: no rank waits for the others before it leaves a group."""
    current = seat.connect(1)
    for generation in range(2, 12):
        upcoming = seat.connect(generation)
        current.wait(start(current, "all_gather"))
        current.wait(start(current, "commit"))
        current.retire(sever=False)
        current = upcoming
    current.wait(start(current, "commit"))
    assert seat.reaper.close(60)
    current.retire(sever=False)
    seat.meet()
    return seat.reaper.added


def test_orderly_leaving_breaks_no_peers_last_operation():
    assert run_world(RANKS, hasty_body) == [11] * RANKS


def interleaved_body(seat: Seat) -> list[float]:
    """Build the next group in another thread while this one is in use, as for a joining worker."""
    communicator = seat.connect(1)
    built: list[Communicator] = []
    builder = threading.Thread(target=lambda: built.append(seat.connect(2)))
    builder.start()
    values = []
    for value in itertools.count():
        still = torch.tensor([float(builder.is_alive())])
        flags = torch.zeros(seat.size)
        communicator.wait(communicator.start_all_gather(flags, still))
        values.append(flags.sum().item())
        if not flags.any() and value:
            break
    builder.join()
    communicator.retire(sever=False)
    communicator = built[0]
    communicator.wait(start(communicator, "all_to_all"))
    communicator.retire(sever=False)
    assert seat.reaper.wait_empty(60)
    return values


def test_a_group_can_be_built_while_another_is_used_and_then_swapped():
    first, *others = run_world(RANKS, interleaved_body)
    assert first[-1] == 0.0
    assert all(values == first for values in others)
