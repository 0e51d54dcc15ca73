"""A stub of Hugging Face's `datasets` for torchtitan's imports; no test needs the real package of 250 MB."""


class Dataset:
    """A stub that no test instantiates."""


def load_dataset(*_: object, **__: object) -> None:
    raise AssertionError("no test reads a data set")
