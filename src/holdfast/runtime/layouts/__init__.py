"""One replica of a model on several workers: process groups for torch's objects, meshes, and what is where."""
