"""A node's agent: its connection to the coordinator, its workers, and the zygote that forks them."""
