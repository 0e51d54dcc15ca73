"""How many nodes each job of a pool gets: the policies."""
