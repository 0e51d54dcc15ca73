"""A stub of `datasets.distributed`."""


def split_dataset_by_node(*_: object, **__: object) -> None:
    raise AssertionError("no test reads a data set")
