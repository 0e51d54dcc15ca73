"""Decisions of the workers of a replica group together (docs/layouts.md). Without a layout, it has one worker."""
