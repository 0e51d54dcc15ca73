"""The common parts of Lazarus' figures: the paper's cluster and models, the recorded loads, and the options."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from holdfast.errors import BadInputError
from holdfast.planning import Plan, allocate, as_slots, make_plan, strategy_named
from holdfast.planning.arrays import IntArray, indices
from holdfast.planning.placement.allocation import Allocation
from holdfast.planning.placement.keeping.repair import Replicas, keep_and_repair, make_worker_room

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
#: The testbed of section 6.1: GPUs (each is a node), expert slots per GPU, and f.
NODES, SLOTS, THRESHOLD = 10, 6, 2
#: Iterations between two records of the recording. The first iteration has number 1.
RECORDED_EVERY = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """One of the models of Table 1, the recording used as its routing, and an expert's state (section 6.3)."""

    name: str
    recording: str
    layers: int
    experts: int
    dim: int
    parameters: float
    expert_bytes: float


MODELS = {
    "S": Model(
        name="GPT-S",
        recording="lazarus_gpt_S_12L8E.npz",
        layers=12,
        experts=8,
        dim=768,
        parameters=521e6,
        expert_bytes=63e6,
    ),
    "M": Model(
        name="GPT-M",
        recording="lazarus_gpt_M_12L12E.npz",
        layers=12,
        experts=12,
        dim=1024,
        parameters=1.3e9,
        expert_bytes=112e6,
    ),
    "L": Model(
        name="GPT-L",
        recording="lazarus_gpt_L_12L16E.npz",
        layers=12,
        experts=16,
        dim=1024,
        parameters=1.7e9,
        expert_bytes=112e6,
    ),
}


class Recording:
    """Recorded loads of one model."""

    def __init__(self, data: Path, model: Model) -> None:
        """Read the recording; raise `BadInputError` if it is missing."""
        with np.load(require_file(data, Path("routing") / model.recording)) as archive:
            #: Shapes `(T,)` and `(T, L, E)`.
            self.iterations: IntArray = archive["iterations"].astype(np.int64)
            self.tokens: IntArray = archive["tokens"].astype(np.int64)

    def tokens_at(self, step: float) -> IntArray:
        """Return tokens `(L, E)` of the recorded iteration nearest to a step."""
        return self.tokens[int(np.abs(self.iterations - 1 - step).argmin())]


def require_file(data: Path, part: Path) -> Path:
    """Return a file of the recorded data; raise `BadInputError` if it is missing."""
    path = data / part
    if not path.is_file():
        raise BadInputError(f"{path} does not exist: give --data DIR, the folder with routing/, spot/ and perfmodel/")
    return path


def make_testbed_plan(loads: IntArray, nodes: int, strategy: str, held: IntArray | None = None) -> Plan:
    """Return a plan for this many nodes of the testbed."""
    slots = as_slots(SLOTS, nodes)
    plan = make_plan(loads, slots, fault_threshold=THRESHOLD, strategy=strategy_named(strategy), held=held)
    if not isinstance(plan, Plan):
        raise BadInputError(str(plan))
    return plan


def repair_placement(held: IntArray, loads: IntArray) -> IntArray:
    """Return the placement that `holdfast` forms at once from `held` `(L, E, N)`: it keeps held replicas."""
    layers, experts, nodes = held.shape
    slots = as_slots(SLOTS, nodes)
    allocation = allocate(loads, slots, fault_threshold=THRESHOLD)
    assert isinstance(allocation, Allocation)
    places = np.repeat(np.argwhere(held > 0), held[held > 0], axis=0)
    replicas = Replicas(layer=places[:, 0], expert=places[:, 1], worker=places[:, 2])
    threshold = allocation.fault_threshold.given
    found = keep_and_repair(replicas, allocation.replicas, make_worker_room(slots, indices(nodes)), threshold)
    assert found is not None
    after = replicas.select(found.stays).concatenate(found.added)
    cells = (after.layer * experts + after.expert) * nodes + after.worker
    return np.bincount(cells, minlength=layers * experts * nodes).reshape(layers, experts, nodes)


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common options of all figures."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the recordings")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "lazarus", help="folder for the pictures")
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of integers that are `least` or more."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < least:
            raise argparse.ArgumentTypeError(f"{text} is not an integer of at least {least}")
        return number

    return read


def above_zero(text: str) -> float:
    """Parse a finite number above 0."""
    return _finite(text, "above 0", lambda number: number > 0)


def from_zero(text: str) -> float:
    """Parse a finite number of 0 or more."""
    return _finite(text, "of 0 or more", lambda number: number >= 0)


def _finite(text: str, wanted: str, fits: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or not fits(number):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number {wanted}")
    return number


def run_figure(make: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """Make a figure; return 2 if an input is missing."""
    try:
        make(options)
    except BadInputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def format_row(name: str, values: Sequence[float | None], width: int = 7, digits: int = 3) -> str:
    """Return one line of a table; None leaves a cell empty."""
    cells = ("" if value is None else f"{value:.{digits}f}" for value in values)
    return f"  {name:44}" + "".join(f"{cell:>{width}}" for cell in cells)
