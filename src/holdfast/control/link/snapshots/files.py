"""Parts of snapshots as files, in memory by default (/dev/shm): they outlive the worker that has written them.

A file is written under a name of its own and renamed once it is whole:

    body      the bytes, whatever they are
    manifest  what they are; for its reader alone
    header    of which job and snapshot it is, and checksums: of the manifest, and of each CHUNK_BYTES of the body
    tail      the header's size and checksum, and what kind of file this is

Nothing in a file is believed before its checksum was looked at, and nothing in it is ever run.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.control.link.wire import checksum
from holdfast.protocol.names import MALFORMED, Count, Name
from holdfast.protocol.state import SnapshotPart

#: 2: the body's checksums are of XXH3
FORMAT = 2
CHUNK_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 64 << 20
MAX_HEADER_BYTES = 16 << 20
#: memory that is left to others where a part is written
SPARE_BYTES = 16 << 20
SUFFIX, WRITING = ".part", ".writing-"

_MAGIC = b"hfsnap\0\1"
_TAIL = struct.Struct("<II8s")  # header bytes, its CRC-32, magic


class PartHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a file says of itself; `checksums`: the manifest's CRC-32, then `checksum` of each chunk of the body."""

    format: int
    job: Name
    snapshot: SnapshotPart
    body_bytes: Count
    manifest_bytes: Count
    checksums: tuple[Count, ...]

    @property
    def file_bytes(self) -> int:
        """What a file with this header takes, the header not counted."""
        return self.body_bytes + self.manifest_bytes


class DamagedPartError(Exception):
    """A part of a snapshot is not what it must be; the message says in what."""


class PartReader(Protocol):
    """A part that is being read: its manifest is known, and its body comes piece by piece, in order."""

    header: PartHeader
    manifest: bytes

    def choose(self, places: Sequence[int]) -> None:
        """Say, once, which chunks of the body are to be read, ascending."""
        ...

    def read_into(self, pieces: list[memoryview]) -> None:
        """Fill memory with the next of these chunks."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


def read_body(
    reader: PartReader,
    target: Callable[[int, int], list[memoryview]],
    wanted: Callable[[int, int], bool] = lambda start, length: True,
) -> None:
    """Bring a body to where it belongs, chunk by chunk; what has come is compared with the checksums there.

    Args:
        target: gives the memory of a chunk, by offset and length. wanted: tells whether that is of any use.

    Raises:
        DamagedPartError: it is not what was written.
        OSError: it cannot be read.
    """
    chosen = {place: chunk for place, chunk in enumerate(chunks(reader.header.body_bytes)) if wanted(*chunk)}
    reader.choose(tuple(chosen))
    for place, (start, length) in chosen.items():
        pieces = target(start, length)
        reader.read_into(pieces)
        if checksum(pieces) != reader.header.checksums[1 + place]:
            raise DamagedPartError(f"bytes {start} to {start + length} of it have another checksum")


def chunks(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the chunks of a body."""
    for start in range(0, nbytes, CHUNK_BYTES):
        yield start, min(CHUNK_BYTES, nbytes - start)


def decode_header(data: bytes, job: str) -> PartHeader:
    """Read a header.

    Raises:
        DamagedPartError: it is none, or of another format or job, or its numbers make no sense.
    """
    try:
        header = msgspec.msgpack.decode(data, type=PartHeader)
    except MALFORMED as error:
        raise DamagedPartError(f"its header cannot be read: {error}") from None
    if header.format != FORMAT:
        raise DamagedPartError(f"it has format {header.format}: this version reads {FORMAT}")
    if header.job != job:
        raise DamagedPartError(f"it is of the job {header.job}")
    wanted = 1 + -(-header.body_bytes // CHUNK_BYTES)
    if header.manifest_bytes > MAX_MANIFEST_BYTES or len(header.checksums) != wanted:
        raise DamagedPartError("the numbers in its header do not fit each other")
    return header


class PartFile:
    """A part that is being written. `body` is its memory: it is all there, and needs no page to be found any more."""

    def __init__(self, folder: Path, body_bytes: int) -> None:
        """Make room for it.

        Raises:
            OSError: there is none.
        """
        self._folder, self._body_bytes = folder, body_bytes
        left = shutil.disk_usage(folder).free - SPARE_BYTES
        if body_bytes > left:
            raise OSError(f"{folder} has no room for {body_bytes} bytes: {max(0, left)} may be taken")
        self._path = folder / f"{WRITING}{os.getpid()}-{secrets.token_hex(8)}"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # (a store never meets a page that cannot be had)
            os.posix_fallocate(self._file, 0, max(1, body_bytes))
            self._map = mmap.mmap(self._file, max(1, body_bytes), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            self._give_up()
            os.close(self._file)
            raise
        self.body = memoryview(self._map)[:body_bytes]

    def finish(self, job: str, snapshot: SnapshotPart, manifest: bytes) -> int:
        """Make it whole, once its body is: compute the checksums, and give it its name; return its bytes.

        Raises:
            OSError: there is no room.
        """
        sums = [checksum([self.body[start : start + length]]) for start, length in chunks(self._body_bytes)]
        header = msgspec.msgpack.encode(
            PartHeader(
                format=FORMAT,
                job=job,
                snapshot=snapshot,
                body_bytes=self._body_bytes,
                manifest_bytes=len(manifest),
                checksums=(zlib.crc32(manifest), *sums),
            )
        )
        rest = manifest + header + _TAIL.pack(len(header), zlib.crc32(header), _MAGIC)
        try:
            os.posix_fallocate(self._file, self._body_bytes, len(rest))
            os.pwrite(self._file, rest, self._body_bytes)
            os.rename(self._path, path_of(self._folder, snapshot))
        except OSError:
            self.abandon()
            raise
        self._close()
        return self._body_bytes + len(rest)

    def abandon(self) -> None:
        """It is not wanted any more."""
        self._give_up()
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            with contextlib.suppress(BufferError):  # (whoever still looks at the body: it goes with the last of them)
                self.body.release()
                self._map.close()

    def _give_up(self) -> None:
        if self._file >= 0:
            self._path.unlink(missing_ok=True)


class StoredPart:
    """A part in a file of this machine, for reading."""

    def __init__(self, path: Path, job: str) -> None:
        """Open it, and look at its header and its manifest.

        Raises:
            DamagedPartError: it is not whole, or not of this job.
            OSError: it cannot be read.
        """
        self.manifest = b""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._chosen: Iterator[int] = iter(())
        try:
            self.header = self._read_header(job)
            self.manifest = os.pread(self._file, self.header.manifest_bytes, self.header.body_bytes)
            if zlib.crc32(self.manifest) != self.header.checksums[0]:
                raise DamagedPartError("its manifest has another checksum")
        except (OSError, DamagedPartError):
            self.close()
            raise

    def _read_header(self, job: str) -> PartHeader:
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode) or status.st_size < _TAIL.size:
            raise DamagedPartError("it is no part of a snapshot")
        end = status.st_size - _TAIL.size
        length, crc, magic = _TAIL.unpack(os.pread(self._file, _TAIL.size, end))
        if magic != _MAGIC or length > min(end, MAX_HEADER_BYTES):
            raise DamagedPartError("it is no part of a snapshot, or was cut short")
        data = os.pread(self._file, length, end - length)
        if zlib.crc32(data) != crc:
            raise DamagedPartError("its header has another checksum")
        header = decode_header(data, job)
        if header.file_bytes != end - length:
            raise DamagedPartError("it was cut short")
        return header

    def fileno(self) -> int:
        """The open file's descriptor."""
        return self._file

    def choose(self, places: Sequence[int]) -> None:
        """Say, once, which chunks of the body are to be read, ascending."""
        self._chosen = iter(places)

    def read_into(self, pieces: list[memoryview]) -> None:
        """Fill memory with the next of these chunks.

        Raises:
            OSError: it ends before.
        """
        at = next(self._chosen) * CHUNK_BYTES
        for piece in pieces:
            done = 0
            while done < len(piece):
                count = os.preadv(self._file, [piece[done:]], at)
                if not count:
                    raise OSError("it ends too early")
                done, at = done + count, at + count

    def close(self) -> None:
        """Let go of it; repeating that does no harm."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def path_of(folder: Path, snapshot: SnapshotPart) -> Path:
    """Return where a part lies in a folder."""
    return folder / f"{snapshot.name}{SUFFIX}"


def make_folder(folder: Path) -> None:
    """Make a folder for parts, which nobody else may read; one that is there must be ours.

    Raises:
        OSError: it cannot be made, or is somebody else's.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{folder} is not a folder of our own that nobody else may open")


def remove_abandoned(folder: Path) -> None:
    """Remove what processes were writing that have ended in the middle of it."""
    for path in folder.glob(f"{WRITING}*"):
        pid = path.name.removeprefix(WRITING).partition("-")[0]
        if pid.isdigit() and not _lives(int(pid)):
            path.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # (somebody else's by now)
    return True


def find_parts(folder: Path, job: str, damaged: Callable[[Path, str], None]) -> list[SnapshotPart]:
    """Return the parts in a folder, as their headers name them, and remove what is none.

    Args:
        damaged: told of each file that was removed, and why.
    """
    found: list[SnapshotPart] = []
    for path in sorted(folder.iterdir()):
        try:
            stored = StoredPart(path, job)
            stored.close()
            if path.name.startswith(WRITING) or path != path_of(folder, stored.header.snapshot):
                raise DamagedPartError("it was never finished")
        except (OSError, DamagedPartError) as error:
            damaged(path, str(error))
            if path.is_dir() and not path.is_symlink():
                continue
            path.unlink(missing_ok=True)
        else:
            found.append(stored.header.snapshot)
    return found
