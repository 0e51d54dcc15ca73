"""The unit that a worker is a place of, where the job has a layout (docs/layouts.md): formed in `holdfast.init()`."""
