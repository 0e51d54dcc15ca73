"""Asks nodes for their memory use and traffic around a change of members, and emits the answers in one event.

The event shows leaving and joining nodes, and one that stays, like Figure 19 of TrainMover. No decision depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.coordination.membership import Node
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.events import MemorySampled
from holdfast.protocol.messages.memory import MemoryOfNode
from holdfast.protocol.messages.progress import MemoryTaken, TakeMemory
from holdfast.protocol.names import node_of
from holdfast.protocol.plan import GenerationPlan

#: Nodes are asked `AFTER_S` seconds after the change. A planned change has two generations, and both are then over. The
#: answers begin `BEFORE_S` seconds before the change.
AFTER_S, BEFORE_S = 2.0, 3.0
#: The most seconds to wait for answers. Agents answer from stored samples, so they need no more time.
ANSWER_S = 1.0
#: the most nodes in an event, one of them a node that stays
MAX_NODES = 4


@dataclass(slots=True)
class _Question:
    number: int
    at: float
    since_generation: int
    #: node -> its role in the change, for each node that was asked
    roles: dict[str, str]
    answers: dict[str, MemoryTaken] = field(default_factory=dict[str, MemoryTaken])


class Memories:
    """Collects the memory use of one job's nodes. A coordinator may lose this state without harm."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        #: the newest generation seen, and its nodes
        self._generation = 0
        self._nodes: tuple[str, ...] = ()
        #: the change to ask about: its time, and the generation and nodes before it
        self._changed_at = 0.0
        self._before: tuple[int, tuple[str, ...]] | None = None
        self._number = 0
        self._question: _Question | None = None

    def tick(self) -> None:
        """Detect changes of the plan's nodes.

        Once a change is over, ask some nodes for their memory use around it; emit the answers as an event when the time
        to answer is over.
        """
        now, plan = self._transaction.now, self._transaction.record.plan
        question = self._question
        if question is not None and now - question.at > ANSWER_S:
            self._emit_sample(question)
        if plan is None:
            return
        self._follow(plan)
        over = now - self._changed_at > AFTER_S and not self._transaction.record.replacements_among(self._nodes)
        if self._before is not None and self._question is None and over:
            self._ask(*self._before)

    def on_memory_taken(self, node: Node, answer: MemoryTaken) -> None:
        """Record the answer of a node, and emit the event if it was the last one. Ignore answers to other questions."""
        question = self._question
        if question is None or answer.number != question.number or node.name not in question.roles:
            return
        question.answers[node.name] = answer
        if question.answers.keys() == question.roles.keys():
            self._emit_sample(question)

    def _follow(self, plan: GenerationPlan) -> None:
        """Record the nodes of a new generation.

        If they differ from the last ones, note the time and the nodes before, unless an earlier change has not been
        asked about yet.
        """
        if plan.generation == self._generation:
            return
        nodes = tuple(dict.fromkeys(map(node_of, plan.workers)))
        if self._generation and self._before is None and set(nodes) != set(self._nodes):
            self._changed_at, self._before = self._transaction.now, (self._generation, self._nodes)
        self._generation, self._nodes = plan.generation, nodes

    def _ask(self, generation: int, before: tuple[str, ...]) -> None:
        """Ask nodes that left, nodes that joined and one that stayed for their memory use around the change; at most
        `MAX_NODES`, only connected ones.

        `generation` and `before` are those before the change.
        """
        self._before = None
        transaction = self._transaction
        here = transaction.members.nodes
        roles = {
            **{name: "leaver" for name in before if name not in self._nodes},
            **{name: "joiner" for name in self._nodes if name not in before},
        }
        asked = dict([(name, role) for name, role in roles.items() if name in here][: MAX_NODES - 1])
        stayer = next((name for name in self._nodes if name in before and name in here), "")
        if stayer:
            asked[stayer] = "stayer"
        if not asked:
            return
        self._number += 1
        self._question = _Question(self._number, transaction.now, generation, asked)
        seconds = transaction.now - self._changed_at + BEFORE_S
        transaction.broadcast(
            (here[name].connection for name in asked), TakeMemory(number=self._number, seconds=seconds)
        )

    def _emit_sample(self, question: _Question) -> None:
        """End the question, and emit the samples and peaks of the nodes that have answered with any."""
        self._question = None
        answered = [
            (name, role, question.answers[name].samples)
            for name, role in question.roles.items()
            if name in question.answers
        ]
        nodes = tuple(
            MemoryOfNode(node=name, role=role, peak=max(one.memory for one in samples), samples=samples)
            for name, role, samples in answered
            if samples
        )
        if nodes:
            self._transaction.emit_at(
                question.at, MemorySampled, since_generation=question.since_generation, nodes=nodes
            )
