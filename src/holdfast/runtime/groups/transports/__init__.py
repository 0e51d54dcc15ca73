"""What carries a group: process groups of torch on gloo or NCCL, and how their sockets are broken."""
