"""Collects the rendezvous keys that a node's workers post for a generation's group, to send them in one bundle."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.coordination.collection.rendezvous import Collected, split
from holdfast.protocol.messages.agent import Posts
from holdfast.protocol.messages.worker import Post

#: the current generation and the pending one
_MAX_GENERATIONS = 2


class PostedKeys:
    """Releases a bundle once every member on the node has posted its keys. Later keys are released at once."""

    def __init__(self) -> None:
        self._collected: dict[int, Collected] = {}

    def add(self, post: Post, members: frozenset[str]) -> Iterator[Posts]:
        """Add a worker's key; return the bundles to send to the coordinator: none until all members on the node have
        posted, then all keys that wait.

        Keys of all but the two newest generations are dropped.

        Args:
            members: The workers of the node that are members of the generation.

        Raises:
            PostedTooMuchError: The worker has posted more than it may.
        """
        collected = self._collected.get(post.generation)
        if collected is None:
            collected = self._collected[post.generation] = Collected(members)
            for old in sorted(self._collected)[:-_MAX_GENERATIONS]:
                del self._collected[old]
        return (Posts(posts=bundle) for bundle in split(collected.add((post,))))
