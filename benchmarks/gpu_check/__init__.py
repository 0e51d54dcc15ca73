"""One command that checks holdfast on a GPU; see docs/gpu.md."""
