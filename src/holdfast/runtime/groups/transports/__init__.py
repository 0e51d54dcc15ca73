"""What a group runs on: gloo, NCCL, or gloo through host memory; and a measurement of link rates."""
