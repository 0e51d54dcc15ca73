"""The state of a launched job: its nodes, its step, its checkpoints, and the message when it is interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from holdfast.errors import BadInputError
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError, find_checkpoints, verify
from holdfast.protocol.events import (
    CheckpointSaved,
    CoordinatorRestarted,
    JobFailed,
    JobFinished,
    NodeLeft,
    NodesJoined,
    ReadEvent,
    RolledBack,
    StepCommitted,
)
from holdfast.protocol.record import KnownCheckpoint
from holdfast.storage import error_text, storage_at


class JobProgress:
    """Follows a job's events."""

    def __init__(self, checkpoints: Sequence[KnownCheckpoint]) -> None:
        """Begin with the checkpoints of an earlier run."""
        self._saved = max((known.step for known in checkpoints), default=0)
        self._committed = 0
        self._agents: dict[str, int] = {}
        self._joined: set[int] = set()
        #: whether the job has ended
        self.over = False

    @property
    def agents(self) -> frozenset[int]:
        """Process ids of the agents of all nodes in the job."""
        return frozenset(self._agents.values())

    @property
    def nodes(self) -> frozenset[str]:
        """Names of all nodes in the job, including nodes of other launchers."""
        return frozenset(self._agents)

    def has_joined(self, agent: int) -> bool:
        """Return whether the node of this agent (a process id) has ever been in the job."""
        return agent in self._joined

    def on_event(self, event: ReadEvent) -> None:
        """Update the job's nodes, its newest committed and saved steps, and whether it is over.

        A rollback lowers the committed step, and a restarted coordinator means that the job is not over. Other events
        are ignored.
        """
        match event:
            case NodesJoined():
                self._agents |= {joined.node: joined.agent_pid for joined in event.nodes}
                self._joined.update(joined.agent_pid for joined in event.nodes)
            case NodeLeft():
                self._agents.pop(event.node, None)
            case StepCommitted():
                self._committed = event.step
            case RolledBack():
                self._committed = event.to_step
            case CheckpointSaved():
                self._saved = event.step
            case JobFinished() | JobFailed() | CoordinatorRestarted():
                self.over = not isinstance(event, CoordinatorRestarted)
            case _:
                pass

    def describe(self, directory: str) -> str:
        """Describe for the user from which saved step the same command continues, and how many later steps are lost.

        `directory` is the checkpoint directory. If it cannot be read, say why.
        """
        try:
            saved = find_newest_saved(directory)
        except (OSError, BadInputError) as error:
            why = error_text(error) if isinstance(error, OSError) else str(error)
            saved_before = f"step {self._saved} was saved; " if self._saved else ""
            return f"{saved_before}what is there now cannot be seen in {directory}: {why}"
        missing = f"step {self._saved} was saved, and is in {directory} no more; " if saved < self._saved else ""
        lost = max(0, self._committed - saved)
        if not saved:
            return missing + (f"nothing is saved: {lost} steps are lost" if lost else "no step was done yet")
        summary = f"{missing}step {saved} is saved: the same command goes on from there"
        return f"{summary}; {lost} later steps are lost" if lost else summary


def find_newest_saved(directory: str) -> int:
    """Return the step of the newest checkpoint whose files are all there with the right sizes, or 0 without one.

    Raises:
        OSError: the directory cannot be read. BadInputError: it is a URL that cannot be used.
    """
    storage = storage_at(directory)
    for name in reversed(find_checkpoints(storage)):
        with contextlib.suppress(DamagedCheckpointError):
            return verify(storage, name.folder, contents=False)
    return 0
