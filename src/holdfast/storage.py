"""Storage for checkpoints: a local folder, or a URL (S3, GCS, ...) through fsspec, with the same interface.

All failures are OSErrors, whichever library raised them. Paths are relative, with `/`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import queue
import re
import secrets
import shutil
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from holdfast.errors import BadInputError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.*", re.DOTALL)
_PROBE = ".holdfast-probe"
#: most seconds for an answer of a remote storage before the job begins
_ANSWER_S = 60.0
#: bytes between two syncs to a disk
_SYNC_BYTES = 1 << 30
#: bytes of one read when a file is copied
_READ_BYTES = 4 << 20

Chunk = bytes | bytearray | memoryview


def is_url(place: str) -> bool:
    """Return whether a place is a URL, and not a path."""
    return _URL.fullmatch(place) is not None


class Storage(ABC):
    """Folders and files at a place. `where` is the place's name for users."""

    #: whether reading is as cheap as from a disk, so that all data can be read again
    local = False

    def __init__(self, where: str) -> None:
        self.where = where

    @abstractmethod
    def entries(self, path: str = "") -> list[str]:
        """Return the names of all entries of a folder, sorted; [] if the folder does not exist."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the bytes of a file."""

    @abstractmethod
    def open(self, path: str) -> BinaryIO:
        """Open a file for reading with random access."""

    @abstractmethod
    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        """Write a file completely and durably, or not at all. An existing file is replaced."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool | None:
        """Write a file if it does not exist: True if it was written, False if it exists.

        None if this storage cannot do that in one operation: then nothing was written.
        """

    @abstractmethod
    def copy(self, path: str, target: str) -> None:
        """Give a file a second name, if possible without copying its bytes."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its contents. A missing one is ignored."""

    def read(self, path: str, at_most: int) -> bytes:
        """Return the contents of a file.

        Raises:
            OSError: the file cannot be read, or has more than `at_most` bytes.
        """
        if self.size(path) > at_most:
            raise OSError(errno.EFBIG, f"it has more than {at_most} bytes")
        with self.open(path) as file:
            return file.read(at_most)

    def check(self) -> None:
        """Check, before training, that files can be written here and read again, with a small file that is removed.

        Raises:
            BadInputError: they cannot.
        """
        probe = f"{_PROBE}-{secrets.token_hex(4)}"
        try:
            self.write(probe, [b"holdfast"])
            found = self.read(probe, 64)
            self.remove(probe)
        except OSError as error:
            raise BadInputError(
                f"the checkpoint directory {self.where} cannot be written to: {error_text(error)}"
            ) from None
        if found != b"holdfast":
            raise BadInputError(f"the checkpoint directory {self.where} gives back other bytes than were written")


def storage_at(place: str | Path) -> Storage:
    """Return the storage at a path or a URL, without accessing it. A `Path` is always local.

    Raises:
        BadInputError: the URL needs a library that is not installed, or fsspec does not support it.
    """
    text = str(place)
    match = None if isinstance(place, Path) else _URL.fullmatch(text)
    return LocalStorage(Path(text).absolute()) if match is None else _remote(text, match[1].lower())


def error_text(error: OSError) -> str:
    """Return a line that says why: the system's words, or the library's."""
    text = str(error.strerror or error).strip() or type(error).__name__
    return text.partition("\n")[0][:300]


class LocalStorage(Storage):
    """A folder of this machine, or one that it has mounted."""

    local = True

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    def entries(self, path: str = "") -> list[str]:
        """Return the names of all entries of a folder, sorted; [] if the folder does not exist or is a file."""
        try:
            return sorted(os.listdir(self._path(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: str) -> int:
        """Return the bytes of a file.

        Raises:
            OSError: it does not exist, or is not a regular file, such as a pipe.
        """
        status = self._path(path).stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device would be read for ever
            raise OSError(errno.EINVAL, "it is not a regular file")
        return status.st_size

    def open(self, path: str) -> BinaryIO:
        return self._path(path).open("rb")

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        """Write a file under a temporary name, sync it, and rename it. After an error the temporary file is removed.

        Every gigabyte is synced, so that `chunks` are taken at the speed of the disk. Missing folders are made, and
        synced.
        """
        final = self._path(path)
        _make_folder(final.parent)
        draft = final.with_name(f".{final.name}.{secrets.token_hex(4)}")
        try:
            with draft.open("wb") as file:
                unsynced = 0
                for chunk in chunks:
                    file.write(chunk)
                    unsynced += len(chunk)
                    if unsynced >= _SYNC_BYTES:  # So the giver of the chunks sees the progress of a slow disk.
                        file.flush()
                        os.fdatasync(file.fileno())
                        unsynced = 0
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, final)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        self._sync_folders(final)

    def create(self, path: str, data: bytes) -> bool | None:
        """Write a file by a hard link if it does not exist: True if it was written, False if it exists.

        None on a file system without hard links: then nothing was written. The file is not synced.
        """
        final = self._path(path)
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = final.with_name(f".{final.name}.{secrets.token_hex(4)}")
        try:
            draft.write_bytes(data)
            os.link(draft, final)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                return None  # a file system without hard links
            raise
        finally:
            draft.unlink(missing_ok=True)
        return True

    def copy(self, path: str, target: str) -> None:
        """Replace `target` by a hard link to a file, or by a copy if links are impossible. Missing folders are made.

        Raises:
            OSError: the file cannot be read; a previous `target` is removed all the same.
        """
        final = self._path(target)
        _make_folder(final.parent)
        final.unlink(missing_ok=True)
        try:
            os.link(self._path(path), final)
        except OSError:
            with self.open(path) as file:
                self.write(target, iter(partial(file.read, _READ_BYTES), b""))
        else:
            self._sync_folders(final)

    def _sync_folders(self, final: Path) -> None:
        """Sync the entry of a file, and the entries of the folders above it within the storage.

        Another process may have made a folder, and not have synced its entry yet.
        """
        folder = final.parent
        _sync(folder)
        while folder != self.folder and self.folder in folder.parents:
            folder = folder.parent
            _sync(folder)

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its contents as far as possible. A missing one is ignored.

        Links are not followed.
        """
        target = self._path(path)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                target.unlink()

    def check(self) -> None:
        """Make the folder if it is missing, and check its permissions. No file is written.

        Raises:
            BadInputError: it cannot be made, or is not writable.
        """
        try:
            _make_folder(self.folder)
        except OSError as error:
            raise BadInputError(f"the checkpoint directory {self.folder} cannot be made: {error.strerror}") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise BadInputError(f"the checkpoint directory {self.folder} is not writable")

    def _path(self, path: str) -> Path:
        """Return the full path. Raises OSError if the path cannot be joined."""
        try:
            return self.folder / path
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from None


class RemoteStorage(Storage):
    """What fsspec reaches. `files`: one of its file systems; `root`: the path there."""

    def __init__(self, where: str, files: Any, root: str) -> None:
        super().__init__(where)
        self._files = files
        self._root = root.rstrip("/")

    def entries(self, path: str = "") -> list[str]:
        """Return the names of all entries of a folder, sorted, without caches; [] if the folder does not exist.

        Raises:
            OSError: the store cannot be read.
        """
        with _as_os_errors():
            self._files.invalidate_cache()
            try:
                found = cast(list[str], self._files.ls(self._full_path(path), detail=False))
            except FileNotFoundError:
                return []
        within = (name.rstrip("/") for name in found if name.strip("/") != self._full_path(path).strip("/"))
        return sorted({name.rsplit("/", 1)[-1] for name in within})  # Some stores list a folder in itself.

    def size(self, path: str) -> int:
        """Return the bytes of a file.

        Raises:
            OSError: it is not a file, or the store does not know its size.
        """
        with _as_os_errors():
            info = self._files.info(self._full_path(path))
        if info.get("type") != "file" or info.get("size") is None:
            raise OSError(errno.EINVAL, "it is not a regular file")
        return int(info["size"])

    def open(self, path: str) -> BinaryIO:
        with _as_os_errors():
            return cast(BinaryIO, io.BufferedReader(_RemoteFile(self._files.open(self._full_path(path), "rb"))))

    def write(self, path: str, chunks: Iterable[Chunk]) -> None:
        """Write a file, which the store must show only when it is closed.

        After an error the incomplete file is discarded.

        An exception of `chunks` is passed on, and one of the store becomes an OSError.
        """
        with _as_os_errors():
            self._files.makedirs(self._full_path(path).rsplit("/", 1)[0], exist_ok=True)
            file = self._files.open(self._full_path(path), "wb")
            try:
                for chunk in chunks:
                    file.write(chunk)
            except BaseException:
                with contextlib.suppress(Exception):  # Discard the incomplete file, if the store can.
                    file.discard()
                raise
            file.close()

    def create(self, path: str, data: bytes) -> bool | None:
        """Write a file if it does not exist: True if it was written, False if it exists or the write failed.

        None if the store does not refuse a second file of the same name, which is tried with a temporary file: then
        nothing was written.

        Raises:
            OSError: the store cannot be asked whether the file exists.
        """
        with _as_os_errors():
            self._files.makedirs(self._full_path(path).rsplit("/", 1)[0], exist_ok=True)
            if self._files.exists(self._full_path(path)):
                return False
        probe = f"{_PROBE}-{secrets.token_hex(4)}"
        # Some file systems treat the mode "xb" like "wb". So first check that a second file of one name is refused.
        if not self._create_exclusively(probe, b"") or self._create_exclusively(probe, b""):
            self.remove(probe)
            return None
        self.remove(probe)
        return self._create_exclusively(path, data)

    def _create_exclusively(self, path: str, data: bytes) -> bool:
        """Write a file in the mode "xb", which must refuse an existing file. Return False after any error."""
        try:
            with self._files.open(self._full_path(path), "xb") as file:
                file.write(data)
        except Exception:  # noqa: BLE001 - each store has its own errors for existing files
            return False
        return True

    def copy(self, path: str, target: str) -> None:
        """Copy a file within the store. Missing folders are made, and a file at `target` is replaced."""
        with _as_os_errors():
            self._files.makedirs(self._full_path(target).rsplit("/", 1)[0], exist_ok=True)
            self._files.cp_file(self._full_path(path), self._full_path(target))

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its contents. A missing one is ignored."""
        with _as_os_errors(), contextlib.suppress(FileNotFoundError):
            self._files.invalidate_cache()
            self._files.rm(self._full_path(path), recursive=True)

    def _full_path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def check(self) -> None:
        """Check as `Storage.check`, in a thread, because a store that cannot be reached may never answer.

        Raises:
            BadInputError: the check failed, or took more than `_ANSWER_S`; then the thread goes on.
        """
        answers: queue.SimpleQueue[BadInputError | None] = queue.SimpleQueue()

        def check_in_background() -> None:
            """Run the check of the base class, and put its error, or None, into `answers`."""
            try:
                super(RemoteStorage, self).check()
            except BadInputError as error:
                answers.put(error)
            else:
                answers.put(None)

        threading.Thread(target=check_in_background, name="holdfast-look", daemon=True).start()
        try:
            error = answers.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise BadInputError(
                f"the checkpoint directory {self.where} has not answered within {_ANSWER_S:g} s: look whether this "
                "machine can reach it"
            ) from None
        if error is not None:
            raise error


class _RemoteFile(io.RawIOBase):
    """A file of fsspec that raises OSError for all failures."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read up to the length of the buffer into it, and return the bytes that were read; 0 at the end."""
        with _as_os_errors():
            data = cast(bytes, self._file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        with _as_os_errors():
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        """Close the file of the store once."""
        if not self.closed:
            with _as_os_errors():
                self._file.close()
        super().close()


@contextlib.contextmanager
def _as_os_errors() -> Generator[None]:
    """Turn all exceptions of a storage library into OSError. An OSError stays as it is."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


def _remote(url: str, scheme: str) -> RemoteStorage:
    """Return the storage at a URL. Nothing is read from it.

    Raises:
        BadInputError: fsspec or the library for this scheme is not installed, or the URL cannot be used.
    """
    try:
        from fsspec import core  # pyright: ignore[reportMissingTypeStubs] - only URLs need it, and it takes long
    except ImportError:
        raise BadInputError(
            f"the checkpoint directory {url} is a URL, which needs fsspec: pip install fsspec, and its dependencies "
            f"for {scheme}://"
        ) from None
    library: Any = core
    try:
        files, root = library.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise BadInputError(f"the checkpoint directory {url} needs a library: {_line(error)}") from None
    except Exception as error:  # noqa: BLE001 - each store has errors of its own
        raise BadInputError(f"the checkpoint directory {url} cannot be used: {_line(error)}") from None
    return RemoteStorage(url, files, root)


def _line(error: Exception) -> str:
    return f"{error}".strip().partition("\n")[0][:300] or type(error).__name__


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, and sync the entries of the new ones, so that they survive a power failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _sync(path.parent)


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
