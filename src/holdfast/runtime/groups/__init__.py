"""Process groups: collectives that nobody is stuck in, on gloo and NCCL, and what becomes of groups given up."""
