"""The identity of a job, which distinguishes jobs of the same name, and the lock of its checkpoint directory."""

from __future__ import annotations

import logging
import secrets
from contextlib import AbstractContextManager
from dataclasses import replace

from holdfast.control.checkpoint_lock import LockOwner, lock_owner, locked_directory
from holdfast.control.coordinator.settings import ServerSettings
from holdfast.protocol.record import Record

_log = logging.getLogger("holdfast.coordinator")


def with_identity(settings: ServerSettings, record: Record | None) -> ServerSettings:
    """Return the settings with the job's identity: the one in the store, or the configured one, or a random one."""
    known = record.identity if record is not None else ""
    identity = known or settings.config.identity or secrets.token_hex(8)
    return replace(settings, config=replace(settings.config, identity=identity))


def is_running(record: Record | None) -> bool:
    """Return whether workers of the job may be training."""
    return record is not None and record.plan is not None and not record.outcome


def checkpoint_lock(settings: ServerSettings, *, running: bool) -> AbstractContextManager[LockOwner | None]:
    """Return a context that holds the lock of the job's checkpoint directory while inside; without a directory, it
    holds none.

    Its value is the owner of a stale lock that was replaced, or None.

    Args:
        settings: of the coordinator
        running: whether the job trains already. If so, problems with the lock are only logged; else entering raises
            BadInputError.
    """
    spec, identity = settings.config.spec, settings.config.identity
    owner = lock_owner(spec.name, identity, str(settings.journal_path or ""))
    return locked_directory(spec.checkpoint.dir, owner, _log.warning, running=running)
