"""The policies: how many nodes each job of a pool gets."""
