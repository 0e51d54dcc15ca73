"""A pool of nodes that jobs share: who owns a node, by numbered grants; what the pool, a job and a node each decide."""
