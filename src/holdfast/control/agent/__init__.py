"""A node's agent process: its channel to the coordinator, its workers, and the zygote that forks them."""
