"""Checkpoints: saved in the background in parts, and readable at any world size.

`CheckpointSaver.save_if_due` is called after each applied step: if a checkpoint is due, it copies this worker's part of
the state, and a thread writes it. `CheckpointSaver.on_order` handles the coordinator's orders about it.
`load_checkpoint` and `load_experts` fill the tensors of a fresh worker. Reading executes nothing: tensors are
safetensors files, all else is typed MessagePack. `BestStates` keeps the best states by an evaluation.
"""
