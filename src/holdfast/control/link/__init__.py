"""The Unix socket and the shared memory between a worker and its agent. `runtime` imports only this of `control`."""
