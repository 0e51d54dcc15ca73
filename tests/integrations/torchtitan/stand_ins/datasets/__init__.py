"""Stands where torchtitan imports Hugging Face's `datasets` from: no test reads one, and it brings 250 MB with it."""


class Dataset:
    """Nobody makes one."""


def load_dataset(*_: object, **__: object) -> None:
    raise AssertionError("no test reads a data set")
