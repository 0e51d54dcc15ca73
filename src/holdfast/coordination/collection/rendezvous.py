"""The keys of groups under construction: each node sends one bundle, and gets one with those of all members.

A bundle is complete by what the plan says, never by time: when every member that it names has posted its keys, be it
none. What comes later goes on by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from holdfast.coordination.transaction import Transaction
from holdfast.protocol.messages.orders import Posted
from holdfast.protocol.messages.worker import Post
from holdfast.protocol.names import MAX_POSTED_BYTES, is_key_of, node_of, posted_bytes
from holdfast.protocol.plan import GenerationPlan


class PostedTooMuchError(Exception):
    """A worker has posted more for a generation than it may."""


def split(posts: Iterable[Post]) -> Iterator[tuple[Post, ...]]:
    """Cut what is posted into bundles that fit into a message each."""
    bundle: list[Post] = []
    room = MAX_POSTED_BYTES
    for post in posts:
        room -= posted_bytes(post.keys)
        if bundle and room < 0:
            yield tuple(bundle)
            bundle, room = [], MAX_POSTED_BYTES - posted_bytes(post.keys)
        bundle.append(post)
    if bundle:
        yield tuple(bundle)


@dataclass(slots=True)
class Collected:
    """The keys of one generation, until they are complete."""

    #: whose keys are awaited
    members: frozenset[str]
    waiting: list[Post] = field(default_factory=list[Post])
    #: how much each member has posted, in bytes
    bytes: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def complete(self) -> bool:
        """True once all members have posted."""
        return len(self.bytes) == len(self.members)

    def take(self, posts: Iterable[Post]) -> Sequence[Post]:
        """Take keys; return those that are to go on now. Those of strangers are dropped.

        Raises:
            PostedTooMuchError: one has posted more than it may.
        """
        for post in posts:
            if post.worker not in self.members:
                continue
            posted = self.bytes.get(post.worker, 0) + posted_bytes(post.keys)
            if posted > MAX_POSTED_BYTES:
                raise PostedTooMuchError(f"{post.worker} has posted {posted} bytes of keys: {MAX_POSTED_BYTES} at most")
            self.bytes[post.worker] = posted
            self.waiting.append(post)
        if not self.complete:
            return ()
        waiting, self.waiting = self.waiting, []
        return waiting


class KeyBundles:
    """Collects what the members of the plan in force, and of the pending one, have posted."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._collected: dict[int, Collected] = {}

    def take(self, node: str, posts: Sequence[Post]) -> str:
        """Take a node's bundle, and send on what is complete by it. Keys of other nodes' workers do not count.

        Returns:
            what is wrong with it, "" where nothing is.
        """
        transaction = self._transaction
        plans = {
            plan.generation: plan for plan in (transaction.record.plan, transaction.record.pending) if plan is not None
        }
        self._collected = {number: known for number, known in self._collected.items() if number in plans}
        for generation in {post.generation for post in posts} & plans.keys():
            plan = plans[generation]
            collected = self._collected.get(generation)
            if collected is None:
                collected = self._collected[generation] = Collected(frozenset(plan.workers))
            own = [post for post in posts if post.generation == generation and node_of(post.worker) == node]
            if why := next(filter(None, (_under_another_name(post, plan) for post in own)), ""):
                return why
            try:
                complete = collected.take(own)
            except PostedTooMuchError as error:
                return str(error)
            for bundle in split(complete):
                keys = {key: value for post in bundle for key, value in post.keys.items()}
                if keys:
                    transaction.order_all(plan.workers, Posted(generation=generation, keys=keys))
        return ""

    def owing(self, plan: GenerationPlan) -> list[str]:
        """Return the members for whose keys all others wait; none where nobody has posted, for that says nothing."""
        collected = self._collected.get(plan.generation)
        if collected is None or collected.complete:
            return []
        return [worker for worker in plan.workers if worker not in collected.bytes]


def _under_another_name(post: Post, plan: GenerationPlan) -> str:
    rank = plan.rank(post.worker)
    key = next((key for key in post.keys if rank is not None and not is_key_of(rank, key)), None)
    return f"{post.worker} has posted a key {key[:64]!r}, which is not that of rank {rank}" if key is not None else ""
