"""The replica group of a worker, formed in `holdfast.init()` if the job has a layout (docs/layouts.md)."""
