"""Records the sync and rename operations of a program."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Disk:
    """Records the order in which files and folders are synced, with their sizes, and files get their names."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.done: list[tuple[str, str, int | str]] = []
        real = {name: getattr(os, name) for name in ("fsync", "fdatasync", "replace", "link")}

        def sync(descriptor: int) -> None:
            real["fsync"](descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            self.done.append(("sync", self._short(path), os.fstat(descriptor).st_size if path.is_file() else 0))

        def renaming(name: str, source: Path, target: Path) -> None:
            real[name](source, target)
            self.done.append(("name", self._short(target), self._short(source)))

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "fdatasync", sync)
        monkeypatch.setattr(os, "replace", lambda source, target: renaming("replace", source, target))
        monkeypatch.setattr(os, "link", lambda source, target: renaming("link", source, target))

    def _short(self, path: str | Path) -> str:
        return os.path.relpath(path, self.folder)

    def last_sync(self, path: str) -> int:
        """Return when a file or folder was last synced, or -1 if it never was."""
        return max((n for n, (what, at, _) in enumerate(self.done) if what == "sync" and at == path), default=-1)

    def check_named(self, path: str, size: int) -> int:
        """Check that a file was completely synced before it got its name; return when it got the name."""
        when = self.named_at(path)
        source = self.done[when][2]
        assert ("sync", source, size) in self.done[:when], f"{path} has its name before it is on disk: {self.done}"
        return when

    def named_at(self, path: str) -> int:
        """Return when a file got its name."""
        (when,) = (n for n, (what, at, _) in enumerate(self.done) if (what, at) == ("name", path))
        return when
