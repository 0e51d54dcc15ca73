"""The I/O shells around coordination: server, agent, zygote, stores. No torch."""
