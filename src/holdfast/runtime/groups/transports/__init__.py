"""The transports of a group (gloo, NCCL, or gloo through host memory), and a measurement of link rates."""
