"""The layout of a checkpoint on disk: names, folders, files with tensors. No torch, no decisions."""
