"""The keys that a node's workers post for the group of a generation, until they go to the coordinator in one bundle."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.coordination.collection.rendezvous import Collected, split
from holdfast.protocol.messages.agent import Posts
from holdfast.protocol.messages.worker import Post

#: the generation in force and the pending one
_MAX_GENERATIONS = 2


class PostedKeys:
    """A bundle goes once every member on the node has posted; what comes after it goes at once."""

    def __init__(self) -> None:
        self._collected: dict[int, Collected] = {}

    def take(self, post: Post, members: frozenset[str]) -> Iterator[Posts]:
        """Take a worker's key, return what is to be sent.

        Args:
            members: those of the node's workers that the plan of its generation names.

        Raises:
            PostedTooMuchError: it has posted more than it may.
        """
        collected = self._collected.get(post.generation)
        if collected is None:
            collected = self._collected[post.generation] = Collected(members)
            for old in sorted(self._collected)[:-_MAX_GENERATIONS]:
                del self._collected[old]
        return (Posts(posts=bundle) for bundle in split(collected.take((post,))))
