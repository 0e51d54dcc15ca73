"""What a script may not protect: refused before anything is trained, in one sentence that says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from holdfast.errors import BadInputError
from holdfast.runtime.session.job import Job

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DATA = TensorDataset(torch.zeros(8, 2))


def protect(model: torch.nn.Module, optimizer: Any = None, **options: Any) -> None:
    optimizer = optimizer or SGD(model.parameters(), lr=0.1)
    Job(None).protect(model, optimizer, DATA, global_batch=4, micro_batch=2, **options)


def other() -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (other, r"extra\['x'\] is an optimizer, which would never step: give all of them by name"),
        (lambda: LambdaLR(other(), lambda _: 1.0), r"extra\['x'\] is a LambdaLR of an optimizer that is not protected"),
    ],
)
def test_an_extra_that_would_never_do_what_it_is_for(thing: Callable[[], object], words: str) -> None:
    with pytest.raises(BadInputError, match=words) as caught:
        protect(torch.nn.Linear(2, 2), extra={"x": thing()})
    assert "\n" not in str(caught.value)
