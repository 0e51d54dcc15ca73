"""How the workers of a node divide one copy of the model, and the messages of a replica group (docs/layouts.md)."""
