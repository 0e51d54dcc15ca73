"""The port and the folders that a job holds on this machine while it runs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator
from pathlib import Path

from holdfast.control.launch.settings import LaunchSettings
from holdfast.control.owned_folders import owned_folder
from holdfast.errors import BadInputError


@contextlib.contextmanager
def reserved_port(port: int) -> Generator[int]:
    """Reserve a port of the loopback, or a free one for 0, and yield it.

    It stays reserved while the coordinator restarts.

    The socket is bound but never listens. With SO_REUSEADDR on both sides a coordinator can listen on the port, and the
    system gives it to no other process.

    Raises:
        BadInputError: another process listens there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", port))
        except OSError as error:
            raise BadInputError(f"--port {port} cannot be used: {error.strerror}; give another, or 0") from None
        yield holder.getsockname()[1]


@contextlib.contextmanager
def job_folders(settings: LaunchSettings) -> Generator[tuple[Path, Path]]:
    """Yield the folder for the job's files, and a private folder with a short name for sockets.

    Create both. Temporary ones are removed at the end; without `job_dir`, one folder serves for both.
    """
    names = (*settings.start_names, *settings.standby_names)
    longest = max(len(f"{name}.sock") for name in names)
    with owned_folder("run", longest) as folder:
        sockets = Path(folder)
        if settings.job_dir is not None:
            settings.job_dir.mkdir(parents=True, exist_ok=True)
        yield settings.job_dir or sockets, sockets
