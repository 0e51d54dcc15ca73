"""Units on a node: which workers make up one replica of the model, and what of a layout cannot be (docs/layouts.md)."""
