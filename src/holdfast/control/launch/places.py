"""What a job holds on this machine while it lasts: its port and its folders."""

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
    """Hold a port of the loopback for the job's whole life, coordinators' restarts included.

    The socket is bound but never listens: with SO_REUSEADDR on both sides a coordinator can listen on the port,
    while nobody else is given it.

    Raises:
        BadInputError: somebody listens there.
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
    """Make the job's folder and a private, short-named one for sockets; the temporary ones go again."""
    names = (*settings.start_names, *settings.standby_names)
    longest = max(len(f"{name}.sock") for name in names)
    with owned_folder("run", longest) as folder:
        sockets = Path(folder)
        if settings.job_dir is not None:
            settings.job_dir.mkdir(parents=True, exist_ok=True)
        yield settings.job_dir or sockets, sockets
