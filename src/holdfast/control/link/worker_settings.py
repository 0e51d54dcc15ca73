"""What a worker process is told by its agent, carried through the environment."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast import environment
from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import JobSpec
from holdfast.protocol.names import MALFORMED


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker's settings; they travel as JSON in a variable of their own.

    spec: the job. socket: path of the agent's Unix socket. worker: this worker's id. host: the address to bind to and
    be reached at. local_rank: index on the node. script_digest: of script and arguments. progress: path of the agent's
    page of progress, "" for none. stacks: file for this worker's stacks, "" for none. zygote: socket of the one that
    has forked this worker, and can fork its loader workers. parts: folder in which parts of checkpoints are handed
    over. snapshots: the agent's folder for parts of snapshots, "" for none.
    """

    spec: JobSpec
    socket: str
    worker: str
    host: str = "127.0.0.1"
    local_rank: int = 0
    script_digest: str = ""
    progress: str = ""
    stacks: str = ""
    zygote: str = ""
    parts: str = ""
    snapshots: str = ""

    def to_environment(self) -> dict[str, str]:
        """Return the variable that carries these settings."""
        return {environment.WORKER: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls, variables: Mapping[str, str]) -> WorkerSettings | None:
        """Read the settings back; None where no agent has started this process.

        Raises:
            BadInputError: the variable does not hold them.
        """
        text = variables.get(environment.WORKER)
        if text is None:
            return None
        try:
            return msgspec.json.decode(text, type=cls)
        except MALFORMED as error:
            raise BadInputError(f"{environment.WORKER} is for agents to set, and holds no settings: {error}") from None
