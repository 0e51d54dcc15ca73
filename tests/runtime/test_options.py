"""Numeric options of scripts, of any numeric type."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.errors import BadInputError
from holdfast.runtime.options import check_integers, check_numbers


def test_python_and_numpy_numbers_are_accepted() -> None:
    check_integers(top_k=2, seed=-(1 << 70), layer=np.int32(3))
    check_numbers(jitter=0, scale=0.5, rate=np.float32(0.5))


@pytest.mark.parametrize("value", ["2", None, True, 2j, [2], torch.tensor(2)])
def test_a_value_of_a_wrong_type_is_refused_with_the_options_name(value: object) -> None:
    with pytest.raises(BadInputError, match=r"^top_k is .*: it must be a whole number$"):
        check_integers(seed=1, top_k=value)
    with pytest.raises(BadInputError, match=r"^scale is .*: it must be a number$"):
        check_numbers(jitter=0.1, scale=value)


def test_a_float_is_refused_as_an_integer() -> None:
    with pytest.raises(BadInputError, match=r"^top_k is 2.0: it must be a whole number$"):
        check_integers(top_k=2.0)
