"""Parts of snapshots that agents serve to each other."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.control.agent.snapshots.fetching import SnapshotFetcher
from holdfast.control.agent.snapshots.part_server import SnapshotServer
from holdfast.control.link import wire as link_wire
from holdfast.control.link.snapshots.files import DamagedPartError, PartWriter, StoredPart, part_path, read_body
from holdfast.control.link.snapshots.reading import ANSWER, MAGIC, REQUEST, TAG, RemotePart, compute_proof
from holdfast.control.link.wire import Wire
from holdfast.protocol.messages.agent import WantedPart
from holdfast.protocol.state import Keeper, SnapshotPart

KEY = b"k" * 32
DEADLINE_S = 60.0
BODY = bytes(range(251)) * 9000


def part(number: int = 0, step: int = 10) -> SnapshotPart:
    return SnapshotPart(term=1, generation=1, step=step, part=number, parts=2, seal=b"s" * 16)


def write(folder: Path, snapshot: SnapshotPart) -> None:
    file = PartWriter(folder, len(BODY))
    file.body[:] = BODY
    file.finish("job", snapshot, b"manifest")


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    """An agent's snapshot server for a folder with one part."""
    folder = tmp_path / "there"
    folder.mkdir()
    write(folder, part())
    door = SnapshotServer("127.0.0.1", folder, "job", lambda: KEY)
    yield Keeper(node="a", host="127.0.0.1", port=door.start())
    door.close()


def body_of(reader: RemotePart | StoredPart) -> bytes:
    found = bytearray(reader.header.body_bytes)
    read_body(reader, lambda start, length: [memoryview(found)[start : start + length]])
    return bytes(found)


def test_a_client_with_the_key_reads_an_unchanged_part(keeper: Keeper) -> None:
    reader = RemotePart(keeper, KEY, part(), "job")
    assert (reader.manifest, reader.header.snapshot) == (b"manifest", part())
    assert body_of(reader) == BODY
    reader.close()


def test_clients_without_the_key_receive_no_data(keeper: Keeper) -> None:
    with pytest.raises(OSError, match="could not prove its identity"):
        RemotePart(keeper, b"x" * 32, part(), "job")
    with socket.create_connection((keeper.host, keeper.port), timeout=DEADLINE_S) as stranger:
        stranger.sendall(MAGIC + b"n" * 32)
        assert len(stranger.recv(64, socket.MSG_WAITALL)) == 64, "the server sends only a nonce and its proof"
        stranger.sendall(b"\x04\x00what" + b"t" * 32)
        assert stranger.recv(1) == b""
    with socket.create_connection((keeper.host, keeper.port), timeout=DEADLINE_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n".ljust(len(MAGIC) + 32))
        assert stranger.recv(1) == b""


def test_requesting_a_missing_part_fails(keeper: Keeper) -> None:
    with pytest.raises(OSError, match="no longer has it"):
        RemotePart(keeper, KEY, part(1), "job")


def test_a_damaged_part_is_refused(keeper: Keeper, tmp_path: Path) -> None:
    path = part_path(tmp_path / "there", part())
    data = bytearray(path.read_bytes())
    data[len(BODY) // 2] ^= 1
    path.write_bytes(data)
    reader = RemotePart(keeper, KEY, part(), "job")
    with pytest.raises(DamagedPartError, match="another checksum"):
        body_of(reader)
    reader.close()


class Fetched:
    """The outcome of a fetch."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.came = threading.Condition()
        self.parts: list[SnapshotPart] = []
        self.fetching = SnapshotFetcher(folder, "job", lambda: KEY, self.take)

    def take(self, snapshot: SnapshotPart) -> None:
        with self.came:
            self.parts.append(snapshot)
            self.came.notify_all()

    def wait(self, count: int) -> None:
        with self.came:
            assert self.came.wait_for(lambda: len(self.parts) == count, timeout=DEADLINE_S)


def test_wanted_parts_are_fetched_newest_first_and_stored(keeper: Keeper, tmp_path: Path) -> None:
    for step in (20, 30):
        write(tmp_path / "there", part(step=step))
    here = Fetched(tmp_path / "here")
    here.fetching.set_wanted([WantedPart(snapshot=part(step=step), keeper=keeper) for step in (10, 20, 30)])
    here.wait(3)
    here.fetching.close()
    assert [one.step for one in here.parts] == [30, 20, 10]
    stored = StoredPart(part_path(here.folder, part(step=20)), "job")
    assert body_of(stored) == BODY
    stored.close()
    assert len(list(here.folder.iterdir())) == 3, "an aborted transfer leaves no files"


def test_a_damaged_remote_part_is_skipped_and_others_are_fetched(keeper: Keeper, tmp_path: Path) -> None:
    write(tmp_path / "there", part(step=20))
    path = part_path(tmp_path / "there", part(step=20))
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    here = Fetched(tmp_path / "here")
    here.fetching.set_wanted([WantedPart(snapshot=part(step=step), keeper=keeper) for step in (10, 20)])
    here.wait(1)
    here.fetching.close()
    assert here.parts == [part()]
    assert [entry.name for entry in here.folder.iterdir()] == [part_path(here.folder, part()).name]


def test_closing_the_fetcher_does_not_wait_for_a_silent_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server proves its identity and then sends nothing more."""
    monkeypatch.setattr(link_wire, "SILENCE_S", 10 * DEADLINE_S)
    served = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            wire, mine = Wire(connection), b"m" * 32
            nonces = wire.read(len(MAGIC) + 32)[len(MAGIC) :] + mine
            wire.write(mine + compute_proof(KEY, b"keeper", nonces))
            (length,) = REQUEST.unpack(wire.read(REQUEST.size))
            wire.read(length + TAG)
            folder = tmp_path / "there"
            folder.mkdir()
            write(folder, part())
            stored = StoredPart(part_path(folder, part()), "job")
            header = msgspec.msgpack.encode(stored.header)
            wire.write(ANSWER.pack(len(header)), header, compute_proof(KEY, b"header", nonces, header), stored.manifest)
            stored.close()
            wire.read(ANSWER.size)
            served.set()
            with contextlib.suppress(OSError):
                connection.recv(1 << 20)
                connection.recv(1)
            connection.close()

        server = threading.Thread(target=serve)
        server.start()
        here = Fetched(tmp_path / "here")
        silent = Keeper(node="b", host="127.0.0.1", port=listener.getsockname()[1])
        here.fetching.set_wanted([WantedPart(snapshot=part(), keeper=silent)])
        assert served.wait(DEADLINE_S)
        closing = threading.Thread(target=here.fetching.close, daemon=True)
        closing.start()
        closing.join(DEADLINE_S)
        assert not closing.is_alive()
        server.join(DEADLINE_S)
    assert (here.parts, list(here.folder.iterdir())) == ([], [])
