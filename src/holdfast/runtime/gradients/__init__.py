"""What one step computes: gradients of micro-batches, their reduction, the optimizer step."""
