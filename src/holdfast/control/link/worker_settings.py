"""The settings that an agent passes to its worker process through the environment."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast import environment
from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.names import MALFORMED


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one worker. They travel as JSON in one environment variable."""

    spec: JobSpec
    #: path of the agent's Unix socket
    socket: str
    #: id of this worker
    worker: str
    #: address to bind to, at which other workers reach this one
    host: str = "127.0.0.1"
    #: index of the worker on its node
    local_rank: int = 0
    #: digest of the script and its arguments
    script_digest: str = ""
    #: path of the agent's progress page, or "" without one
    progress: str = ""
    #: file for this worker's stack dumps, or "" without one
    stacks: str = ""
    #: socket of the zygote that forked this worker and can fork its loader workers
    zygote: str = ""
    #: spool folder in which the worker hands over parts of checkpoints
    parts: str = ""
    #: the agent's folder for parts of snapshots, or "" without one
    snapshots: str = ""

    def to_environment(self) -> dict[str, str]:
        """Return the environment variable that carries these settings."""
        return {environment.WORKER: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> WorkerSettings | None:
        """Read the settings, or return None if no agent has started this process.

        Raises:
            BadInputError: the variable does not contain valid settings.
        """
        text = variables.get(environment.WORKER)
        if text is None:
            return None
        try:
            return msgspec.json.decode(text, type=cls)
        except MALFORMED as error:
            raise BadInputError(
                f"{environment.WORKER} is set by agents only, and its value is not valid: {error}. Unset it"
            ) from None
