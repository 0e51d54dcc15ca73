"""A pool's node: the agent that is its fence, and the processes of the grant that it has."""
