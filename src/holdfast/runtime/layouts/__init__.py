"""A replica of the model over several processes of a node: local shards, meshes, groups (docs/layouts.md)."""
