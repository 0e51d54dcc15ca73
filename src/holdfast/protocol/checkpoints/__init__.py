"""What a checkpoint is once it is written: names, folders, files with tensors. No torch, no decisions."""
