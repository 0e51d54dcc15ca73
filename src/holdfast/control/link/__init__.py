"""The Unix socket between a worker and its agent: all of control that runtime may import."""
