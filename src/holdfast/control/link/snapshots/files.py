"""Parts of snapshots as files, by default in memory (/dev/shm), so that they outlive the worker that wrote them.

A file is written under a temporary name, and renamed once it is complete:

body      the bytes of the state
manifest  the description of the bytes; only their reader interprets it
header    job and snapshot, and checksums: of the manifest, and of each CHUNK_BYTES of the body
tail      the header's size and checksum, and the magic number of this format

A reader verifies the checksum of each part of a file before it uses it, and never executes anything from a file.
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

from holdfast.control.link.wire import compute_checksum
from holdfast.protocol.names import MALFORMED, Count, Name
from holdfast.protocol.state import SnapshotPart

#: since format 2 the checksums of the body use XXH3
FORMAT = 2
CHUNK_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 64 << 20
MAX_HEADER_BYTES = 16 << 20
#: bytes of the folder's free space that a writer leaves to others
SPARE_BYTES = 16 << 20
SUFFIX = ".part"
WRITING = ".writing-"

_MAGIC = b"hfsnap\0\1"
_TAIL = struct.Struct("<II8s")  # header bytes, its CRC-32, magic


class PartHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The header of a file."""

    format: int
    job: Name
    snapshot: SnapshotPart
    body_bytes: Count
    manifest_bytes: Count
    #: the manifest's CRC-32, then `checksum` of each chunk of the body
    checksums: tuple[Count, ...]

    @property
    def file_bytes(self) -> int:
        """The size of a file with this header, without header and tail."""
        return self.body_bytes + self.manifest_bytes


class DamagedPartError(Exception):
    """A part of a snapshot is damaged, or is not the expected one. The message says why."""


class PartReader(Protocol):
    """A part that is being read. Its manifest is known, and its body comes chunk by chunk, in order."""

    header: PartHeader
    manifest: bytes

    def select_chunks(self, indices: Sequence[int]) -> None:
        """Select the chunks of the body to read, by ascending index. Called once."""
        ...

    def read_into(self, pieces: list[memoryview]) -> None:
        """Fill memory with the next selected chunk."""
        ...

    def close(self) -> None:
        """Release the part."""
        ...


def read_body(
    reader: PartReader,
    target: Callable[[int, int], list[memoryview]],
    wanted: Callable[[int, int], bool] = lambda start, length: True,
) -> None:
    """Read the body of a part into memory, chunk by chunk, and verify the checksums there.

    Args:
        target: returns the memory for a chunk, by offset and length.
        wanted: returns whether a chunk is needed, by offset and length.

    Raises:
        DamagedPartError: a checksum differs.
        OSError: the part cannot be read.
    """
    chosen = {index: chunk for index, chunk in enumerate(iterate_chunks(reader.header.body_bytes)) if wanted(*chunk)}
    reader.select_chunks(tuple(chosen))
    for index, (start, length) in chosen.items():
        pieces = target(start, length)
        reader.read_into(pieces)
        if compute_checksum(pieces) != reader.header.checksums[1 + index]:
            raise DamagedPartError(f"bytes {start} to {start + length} of it have another checksum")


def iterate_chunks(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the offset and length of each chunk of a body."""
    for start in range(0, nbytes, CHUNK_BYTES):
        yield start, min(CHUNK_BYTES, nbytes - start)


def decode_header(data: bytes, job: str) -> PartHeader:
    """Decode a header.

    Raises:
        DamagedPartError: it is not a header, is of another format or job, or its numbers are inconsistent.
    """
    try:
        header = msgspec.msgpack.decode(data, type=PartHeader)
    except MALFORMED as error:
        raise DamagedPartError(f"its header cannot be read: {error}") from None
    if header.format != FORMAT:
        raise DamagedPartError(f"it has format {header.format}: this version reads format {FORMAT} only")
    if header.job != job:
        raise DamagedPartError(f"it is of the job {header.job}")
    wanted = 1 + -(-header.body_bytes // CHUNK_BYTES)
    if header.manifest_bytes > MAX_MANIFEST_BYTES or len(header.checksums) != wanted:
        raise DamagedPartError("the numbers in its header do not fit each other")
    return header


class PartWriter:
    """A part that is being written.

    `body` is its memory. All its pages are allocated and mapped already.
    """

    def __init__(self, folder: Path, body_bytes: int) -> None:
        """Allocate the memory.

        Raises:
            OSError: there is not enough memory.
        """
        self._folder, self._body_bytes = folder, body_bytes
        left = shutil.disk_usage(folder).free - SPARE_BYTES
        if body_bytes > left:
            raise OSError(f"{folder} has no room for {body_bytes} bytes: {max(0, left)} are free for use")
        self._path = folder / f"{WRITING}{os.getpid()}-{secrets.token_hex(8)}"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # Allocate now: otherwise a later store to a page could fail with SIGBUS.
            os.posix_fallocate(self._file, 0, max(1, body_bytes))
            self._map = mmap.mmap(self._file, max(1, body_bytes), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            self._unlink()
            os.close(self._file)
            raise
        self.body = memoryview(self._map)[:body_bytes]

    def finish(self, job: str, snapshot: SnapshotPart, manifest: bytes) -> int:
        """Complete the file once its body is written: add the checksums, rename and close it, and return its size in
        bytes.

        Raises:
            OSError: there is not enough memory. The file is removed.
        """
        sums = [
            compute_checksum([self.body[start : start + length]]) for start, length in iterate_chunks(self._body_bytes)
        ]
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
            os.rename(self._path, part_path(self._folder, snapshot))
        except OSError:
            self.abandon()
            raise
        self._close()
        return self._body_bytes + len(rest)

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._unlink()
        self._close()

    def _close(self) -> None:
        """Close the file and release its memory. A repeated call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            # If someone still uses the body, its memory is freed with the last reference.
            with contextlib.suppress(BufferError):
                self.body.release()
                self._map.close()

    def _unlink(self) -> None:
        """Remove the unfinished file, unless it is closed already."""
        if self._file >= 0:
            self._path.unlink(missing_ok=True)


class StoredPart:
    """A part in a file of this machine, for reading."""

    def __init__(self, path: Path, job: str) -> None:
        """Open the file, and read its header and manifest.

        Raises:
            DamagedPartError: it is incomplete or damaged, or belongs to another job.
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
        """Read and check the tail and the header at the end of the file; return the header.

        Raises:
            DamagedPartError: the file is not a part, was cut short or damaged, or belongs to another job.
            OSError: it cannot be read.
        """
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode) or status.st_size < _TAIL.size:
            raise DamagedPartError("it is not a part of a snapshot")
        end = status.st_size - _TAIL.size
        length, crc, magic = _TAIL.unpack(os.pread(self._file, _TAIL.size, end))
        if magic != _MAGIC or length > min(end, MAX_HEADER_BYTES):
            raise DamagedPartError("it is not a part of a snapshot, or was cut short")
        data = os.pread(self._file, length, end - length)
        if zlib.crc32(data) != crc:
            raise DamagedPartError("its header has another checksum")
        header = decode_header(data, job)
        if header.file_bytes != end - length:
            raise DamagedPartError("it was cut short")
        return header

    def fileno(self) -> int:
        """Return the descriptor of the open file."""
        return self._file

    def select_chunks(self, indices: Sequence[int]) -> None:
        """Select the chunks of the body to read, by ascending index. Called once."""
        self._chosen = iter(indices)

    def read_into(self, pieces: list[memoryview]) -> None:
        """Fill memory with the next selected chunk.

        Raises:
            OSError: the file ends too early.
        """
        offset = next(self._chosen) * CHUNK_BYTES
        for piece in pieces:
            done = 0
            while done < len(piece):
                count = os.preadv(self._file, [piece[done:]], offset)
                if not count:
                    raise OSError("it ends too early")
                done, offset = done + count, offset + count

    def close(self) -> None:
        """Close the file. A repeated call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def part_path(folder: Path, snapshot: SnapshotPart) -> Path:
    """Return the path of a part in a folder."""
    return folder / f"{snapshot.name}{SUFFIX}"


def make_folder(folder: Path) -> None:
    """Create a folder for parts, which no other user may read. An existing folder must be our own.

    Raises:
        OSError: it cannot be created, or belongs to another user, or other users may open it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{folder} must be a folder that belongs to this user, and that no other user may open")


def remove_abandoned(folder: Path) -> None:
    """Remove the unfinished files of processes that have ended."""
    for path in folder.glob(f"{WRITING}*"):
        pid = path.name.removeprefix(WRITING).partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    """Return whether a process with this id exists, even one of another user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's process has this id
    return True


def find_parts(folder: Path, job: str, damaged: Callable[[Path, str], None]) -> list[SnapshotPart]:
    """Return the parts in a folder, as their headers name them, and remove files that are not valid parts.

    Args:
        damaged: called with each path that is not a valid part, and the reason. Folders are reported, but not removed.
    """
    found: list[SnapshotPart] = []
    for path in sorted(folder.iterdir()):
        try:
            stored = StoredPart(path, job)
            stored.close()
            if path.name.startswith(WRITING) or path != part_path(folder, stored.header.snapshot):
                raise DamagedPartError("it was never finished")
        except (OSError, DamagedPartError) as error:
            damaged(path, str(error))
            if path.is_dir() and not path.is_symlink():
                continue
            path.unlink(missing_ok=True)
        else:
            found.append(stored.header.snapshot)
    return found
