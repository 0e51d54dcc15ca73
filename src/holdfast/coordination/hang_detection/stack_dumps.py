"""Collects stack dumps of a job that stood still: the activity, the waits and the lines of each worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.coordination.membership import Node
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.events import StacksTaken
from holdfast.protocol.failures import SeenWait, SeenWorker, SharedStack
from holdfast.protocol.messages.progress import Stacks, TakeStacks, ThreadActivity, WorkerStack
from holdfast.protocol.names import node_of

#: seconds to wait for stacks; an agent waits a tenth of a second for its workers
ANSWER_S = 1.0
#: Most workers of an event; only their nodes are asked.
MAX_WORKERS = 64
#: most characters of their stacks; most workers stand at the same line
MAX_CHARACTERS = 1 << 16


@dataclass(slots=True)
class _Dump:
    """A stack dump that is being collected."""

    number: int
    at: float
    generation: int
    #: workers or nodes, by their names for users
    suspects: tuple[str, ...]
    #: activities of the workers in the event
    stands: Mapping[str, ThreadActivity]
    #: number of workers left out
    missing: int
    #: names of the workers for users; valid while the generation lasts
    names: Mapping[str, str]
    #: nodes that have not answered
    open: set[str]
    stacks: dict[str, WorkerStack] = field(default_factory=dict[str, WorkerStack])


class StackDumps:
    """Asks for stacks when a worker or node is suspected, and puts the answers into one event."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._number = 0
        self._dump: _Dump | None = None
        #: stacks of the newest dump, by worker
        self._newest_stacks: Mapping[str, WorkerStack] = {}

    def start(self, nodes: Sequence[Node], stands: Mapping[str, ThreadActivity], suspects: Iterable[str]) -> None:
        """Ask these nodes for stacks of their workers, of at most 64 workers, unless a dump is being collected.

        Args:
            nodes: the nodes that answer.
            stands: the activities of the workers in the event.
            suspects: workers or silent nodes; their stacks come first.
        """
        if self._dump is not None:
            return
        self._number += 1
        transaction = self._transaction
        suspects = tuple(suspects)
        workers = list(dict.fromkeys((*(one for one in suspects if one in stands), *stands)))[:MAX_WORKERS]
        hosts = {node_of(worker) for worker in workers}
        asked = [node for node in nodes if node.name in hosts]
        self._dump = _Dump(
            number=self._number,
            at=transaction.now,
            generation=transaction.generation,
            suspects=tuple(transaction.place_of(one) if one in stands else one for one in suspects)[:MAX_WORKERS],
            stands={worker: stands[worker] for worker in workers},
            missing=len(stands) - len(workers),
            names={worker: transaction.place_of(worker) for worker in workers},
            open={node.name for node in asked},
        )
        transaction.broadcast((node.connection for node in asked), TakeStacks(number=self._number))

    def on_stacks(self, node: Node, answer: Stacks) -> None:
        """Add a node's stacks to the dump that is being collected; emit the dump if all nodes have answered.

        Stacks for another dump, or a second answer of the node, are ignored.
        """
        dump = self._dump
        if dump is None or answer.number != dump.number or node.name not in dump.open:
            return
        dump.open.discard(node.name)
        known = (
            stack for stack in answer.workers if node_of(stack.worker) == node.name and stack.worker in dump.stands
        )
        dump.stacks.update((stack.worker, stack) for stack in known)
        if not dump.open:
            self._emit_dump(dump)

    def tick(self) -> None:
        """Emit the dump without the nodes that have not answered within a second."""
        dump = self._dump
        if dump is not None and self._transaction.now - dump.at > ANSWER_S:
            self._emit_dump(dump)

    def stack_lines(self, worker: str) -> tuple[str, ...]:
        """Return the lines at which a worker's threads stood in the newest dump; () if it has none."""
        stack = self._newest_stacks.get(worker)
        return tuple(stack.stack.splitlines()) if stack is not None else ()

    def _emit_dump(self, dump: _Dump) -> None:
        """Emit `stacks_taken` with a dump's activities and stacks, and keep the stacks as the newest ones."""
        self._dump, self._newest_stacks = None, dump.stacks
        self._transaction.emit(
            StacksTaken,
            of_generation=dump.generation,
            suspects=dump.suspects,
            workers=tuple(_describe_worker(dump, worker) for worker in dump.stands),
            stacks=_group_stacks(dump),
            missing=dump.missing,
        )


def _describe_worker(dump: _Dump, worker: str) -> SeenWorker:
    """Return the activity and collectives of a worker, for the event; no collectives if its stack has not arrived."""
    stand, stack = dump.stands[worker], dump.stacks.get(worker)
    collectives = tuple(
        SeenWait(what=one.what, size=one.size, bytes=one.bytes, began_s=one.began_s, took_s=one.took_s)
        for one in (stack.collectives if stack is not None else ())
    )
    return SeenWorker(
        worker=dump.names[worker],
        step=stand.step,
        phase=str(stand.activity),
        for_s=stand.for_s,
        waits=stand.waits,
        micro_batch=stand.micro_batch,
        collectives=collectives,
    )


def _group_stacks(dump: _Dump) -> tuple[SharedStack, ...]:
    """Return the different stacks, each with the names of the workers that share it, until a limit of characters."""
    alike: dict[str, list[str]] = {}
    for worker in dump.stands:
        stack = dump.stacks.get(worker)
        if stack is not None and stack.stack:
            alike.setdefault(stack.stack, []).append(dump.names[worker])
    room, shared = MAX_CHARACTERS, list[SharedStack]()
    for text, named in alike.items():
        room -= len(text)
        if room < 0:
            break
        shared.append(SharedStack(workers=tuple(named), lines=tuple(text.splitlines())))
    return tuple(shared)
