"""Reading of sparing cases: the shipped example, and one clear line for everything wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.spares_toml import read_case
from holdfast.errors import BadInputError
from holdfast.reliability.block_mtbf import RepairChain
from holdfast.reliability.checkpointing import FailureClock
from holdfast.reliability.recovery import Elastic, RackFailures, SemiSynchronous
from holdfast.reliability.reference import catalina

EXAMPLE = Path(__file__).parents[2] / "examples" / "catalina.toml"

MINIMAL = """
[cluster]
zones = 1
racks_per_zone = 8
gpus_per_rack = 16
gpus_per_tray = 2
[failures]
mtbf_tray_hours = 1000
mtbf_rack_hours = 500
mttr_hours = 10
[checkpoint]
period_seconds = 600
save_seconds = 10
detect_seconds = 30
restart_seconds = 60
[[strategy]]
block_gpus = 16
spare_gpus = 2
"""


def read(tmp_path: Path, text: str):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_case(path)


def test_the_example_is_the_papers_case() -> None:
    assert read_case(EXAMPLE).case == catalina()


def test_defaults(tmp_path: Path) -> None:
    case = read(tmp_path, MINIMAL).case
    assert case.failures.repair_chain is RepairChain.TOGETHER
    assert case.failures.rack_failures is RackFailures.PER_BLOCK
    assert case.placement is case.hardware is case.model is None
    assert case.strategies[0].spare_blocks is None
    assert case.is_synchronous


def test_every_option(tmp_path: Path) -> None:
    text = MINIMAL.replace(
        "mttr_hours = 10", 'mttr_hours = 10\nrepair_chain = "individual"\nrack_failures = "per_rack"'
    )
    text = text.replace("restart_seconds = 60", 'restart_seconds = 60\nclock = "running"')
    text += "spare_blocks = 2\n[placement]\ngroup_gpus = 42\n[model]\nalpha = 0.1\nbaseline_tensor_parallel = 8\n"
    text += "[hardware]\npower_limit_ratio = 1.21\nexposed_communication = 0.5\n"
    text += '[recovery]\nscheme = "semi_synchronous"\nloss_limit_zones = 1\n'
    case = read(tmp_path, text).case
    assert case.failures.repair_chain is RepairChain.INDIVIDUAL
    assert case.failures.rack_failures is RackFailures.PER_RACK
    assert isinstance(case.recovery, SemiSynchronous)
    assert case.recovery.checkpoint.clock is FailureClock.RUNNING
    assert case.hardware is not None
    assert case.hardware.value == pytest.approx(1.05)
    assert case.strategies[0].spare_blocks == 2


def test_elastic_needs_no_checkpoint(tmp_path: Path) -> None:
    start, end = MINIMAL.index("[checkpoint]"), MINIMAL.index("[[strategy]]")
    text = MINIMAL[:start] + '[recovery]\nscheme = "elastic"\ndown_seconds = 30\n' + MINIMAL[end:]
    assert read(tmp_path, text).case.recovery == Elastic(down_seconds=30.0)


WRONG = [
    ("mtbf_tray_hours = 1000", "mtbf_tray_hour = 1000", "failures.mtbf_tray_hour: unknown key.*mtbf_tray_hours"),
    ("[cluster]", "[clusters]", "clusters: unknown section.*cluster"),
    ("zones = 1", "zones = 0", "cluster.zones = 0: must be greater than 0"),
    ("zones = 1", "zones = 1.5", "cluster.zones = 1.5: must be a whole number"),
    ("zones = 1", "zones = true", "cluster.zones = True: must be a whole number"),
    ("zones = 1", "", "cluster.zones: is missing"),
    ("gpus_per_tray = 2", "gpus_per_tray = 3", "cluster.gpus_per_tray = 3: must divide gpus_per_rack = 16"),
    ("mttr_hours = 10", "mttr_hours = -1", "failures.mttr_hours = -1: must be greater than 0"),
    ("mttr_hours = 10", "mttr_hours = nan", "failures.mttr_hours = nan: must be greater than 0"),
    ("mttr_hours = 10", 'mttr_hours = "x"', "failures.mttr_hours = 'x': must be a number"),
    ("mttr_hours = 10", 'mttr_hours = 1\nrepair_chain = "x"', 'repair_chain = .x.: must be "together" or "individual"'),
    ("period_seconds = 600", "period_seconds = 0", "checkpoint.period_seconds = 0: must be greater than 0"),
    ("save_seconds = 10", "save_seconds = -2", "checkpoint.save_seconds = -2: must be 0 or more"),
    ("block_gpus = 16", "block_gpus = 12", r"strategy\[0\].block_gpus = 12: must divide .*gpus_per_rack = 16"),
    ("block_gpus = 16", "block_gpus = 1", r"strategy\[0\].spare_gpus = 2: must be fewer than block_gpus = 1"),
    ("spare_gpus = 2", "spare_gpus = 16", r"strategy\[0\].spare_gpus = 16: must be fewer than block_gpus = 16"),
    ("spare_gpus = 2", "spare_gpus = 3", r"strategy\[0\].spare_gpus = 3: must be a multiple of .*gpus_per_tray = 2"),
    ("spare_gpus = 2", "", r"strategy\[0\].spare_gpus: is missing"),
    ("spare_gpus = 2", "spare_gpus = 2\nspare_blocks = 8", r"strategy\[0\].spare_blocks = 8: must be fewer than the 8"),
    ("[[strategy]]", "[placement]\ngroup_gpus = 20\n[[strategy]]", "placement.group_gpus = 20: must be a multiple of"),
    ("[[strategy]]", "[placement]\ngroup_gpus = 126\n[[strategy]]", "placement.group_gpus = 126: .*only 8"),
    (
        "[[strategy]]\nblock_gpus = 16",
        "[placement]\ngroup_gpus = 28\n[[strategy]]\nspare_blocks = 1\nblock_gpus = 16",
        "spare_blocks = 1: leaves 7 working blocks",
    ),
    ("[[strategy]]", "[hardware]\n[[strategy]]", "hardware: give either gain, or both"),
    ("[[strategy]]", "[hardware]\ngain = 1.1\npower_limit_ratio = 1\n[[strategy]]", "hardware: give either gain"),
    ("[[strategy]]", '[recovery]\nscheme = "elastic"\n[[strategy]]', "recovery.down_seconds: is missing"),
    (
        "[[strategy]]",
        '[recovery]\nscheme = "synchronous"\ndown_seconds = 1\n[[strategy]]',
        "down_seconds: has no meaning",
    ),
    (
        "[[strategy]]",
        '[recovery]\nscheme = "semi_synchronous"\nloss_limit_zones = 2\n[[strategy]]',
        "recovery.loss_limit_zones = 2: must be at most cluster.zones = 1",
    ),
    ("[[strategy]]", "strategy = 3\n[x]", "unknown"),
    ("zones = 1", "zones = = 1", "is not valid TOML"),
]


@pytest.mark.parametrize(("good", "bad", "message"), WRONG, ids=[str(index) for index in range(len(WRONG))])
def test_bad_input_is_one_line_that_names_key_and_rule(tmp_path: Path, good: str, bad: str, message: str) -> None:
    assert good in MINIMAL
    with pytest.raises(BadInputError, match=message) as error:
        read(tmp_path, MINIMAL.replace(good, bad, 1))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "cluster.toml"))


def test_no_strategy_and_no_checkpoint_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"at least one \[\[strategy\]\]"):
        read(tmp_path, MINIMAL[: MINIMAL.index("[[strategy]]")])
    start, end = MINIMAL.index("[checkpoint]"), MINIMAL.index("[[strategy]]")
    with pytest.raises(BadInputError, match="checkpoint: this section is missing"):
        read(tmp_path, MINIMAL[:start] + MINIMAL[end:])
    with pytest.raises(BadInputError, match="cannot be read: No such file"):
        read_case(tmp_path / "none.toml")
