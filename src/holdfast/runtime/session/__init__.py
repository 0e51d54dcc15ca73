"""The training script's side of a job, and the thread shell around its worker's machine."""
