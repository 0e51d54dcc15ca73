"""Exchanges the keys of a group under construction: each node sends one bundle, and receives one with all keys.

The exchange is complete when every member of the plan has posted its keys, even if it has none. It does not depend
on time. Keys that are posted later are forwarded at once.
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
    """A worker has posted more bytes for a generation than allowed."""


def split(posts: Iterable[Post]) -> Iterator[tuple[Post, ...]]:
    """Split posts into bundles that each fit into a message. A post that is larger alone gets its own bundle."""
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
    """The rendezvous keys of one generation, until all members have posted theirs."""

    #: the workers that must post
    members: frozenset[str]
    waiting: list[Post] = field(default_factory=list[Post])
    #: the bytes that each member has posted
    bytes: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def complete(self) -> bool:
        """Whether all members have posted."""
        return len(self.bytes) == len(self.members)

    def add(self, posts: Iterable[Post]) -> Sequence[Post]:
        """Add keys; return the keys to forward now: none until every member has posted, then all that wait, and later
        ones at once.

        Keys of workers that are not members are dropped.

        Raises:
            PostedTooMuchError: A worker has posted too many bytes.
        """
        for post in posts:
            if post.worker not in self.members:
                continue
            posted = self.bytes.get(post.worker, 0) + posted_bytes(post.keys)
            if posted > MAX_POSTED_BYTES:
                raise PostedTooMuchError(
                    f"{post.worker} has posted {posted} bytes of keys; at most {MAX_POSTED_BYTES} are allowed"
                )
            self.bytes[post.worker] = posted
            self.waiting.append(post)
        if not self.complete:
            return ()
        waiting, self.waiting = self.waiting, []
        return waiting


class KeyBundles:
    """Collects the keys that the members of the current and of the pending plan have posted."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._collected: dict[int, Collected] = {}

    def on_posts(self, node: str, posts: Sequence[Post]) -> str:
        """Add a node's bundle for the current or the pending generation, and forward keys to all members once every
        member has posted.

        Keys of other nodes' workers and of other generations are ignored.

        Returns:
            The error in the bundle, or "".
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
            if why := next(filter(None, (_describe_foreign_key(post, plan) for post in own)), ""):
                return why
            try:
                complete = collected.add(own)
            except PostedTooMuchError as error:
                return str(error)
            for bundle in split(complete):
                keys = {key: value for post in bundle for key, value in post.keys.items()}
                if keys:
                    transaction.order_all(plan.workers, Posted(generation=generation, keys=keys))
        return ""

    def list_missing_members(self, plan: GenerationPlan) -> list[str]:
        """Return the members that have not posted their keys for this plan.

        Empty if no member has posted yet, or all have.
        """
        collected = self._collected.get(plan.generation)
        if collected is None or collected.complete:
            return []
        return [worker for worker in plan.workers if worker not in collected.bytes]


def _describe_foreign_key(post: Post, plan: GenerationPlan) -> str:
    """Return the error if a worker has posted a key that does not belong to its rank, or ""."""
    rank = plan.rank(post.worker)
    key = next((key for key in post.keys if rank is not None and not is_key_of(rank, key)), None)
    return (
        f"{post.worker} has posted the key {key[:64]!r}, which is not a key of its rank {rank}"
        if key is not None
        else ""
    )
