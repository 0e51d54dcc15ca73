"""Tests of reading sparing cases: the shipped example, and one clear line for every error."""

from __future__ import annotations

from pathlib import Path

import pytest
from built_commands import BuiltCommands
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.cli.planner.spares.commands import app
from holdfast.cli.planner.spares.toml import read_case
from holdfast.errors import EXIT_BAD_INPUT, BadInputError
from holdfast.planner.reliability.sparing.block_mtbf import RepairChain
from holdfast.planner.reliability.sparing.recovery import Elastic, RackFailures, SemiSynchronous, Synchronous
from holdfast.planner.reliability.sparing.reference import catalina
from holdfast.planning.checkpointing import FailureClock
from places import EXAMPLES

EXAMPLE = EXAMPLES / "catalina.toml"

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


def test_the_example_file_matches_the_papers_case() -> None:
    assert read_case(EXAMPLE).case == catalina()


def test_missing_options_have_their_defaults(tmp_path: Path) -> None:
    case = read(tmp_path, MINIMAL).case
    assert case.failures.repair_chain is RepairChain.TOGETHER
    assert case.failures.rack_failures is RackFailures.PER_BLOCK
    assert case.placement is case.hardware is case.model is None
    assert case.strategies[0].spare_blocks is None
    assert isinstance(case.recovery, Synchronous)


def test_every_option_is_read(tmp_path: Path) -> None:
    text = MINIMAL.replace(
        "mttr_hours = 10", 'mttr_hours = 10\nrepair_chain = "individual"\nrack_failures = "per_rack"'
    )
    text = text.replace("restart_seconds = 60", 'restart_seconds = 60\nclock = "running"')
    text += "spare_blocks = 2\n[placement]\ngroup_gpus = 42\n[model]\nalpha = 0.1\nbaseline_tensor_parallel = 8\n"
    text += "[hardware]\nspare_gpus_per_rack = 4\npower_limit_ratio = 1.21\nexposed_communication = 0.5\n"
    text += '[recovery]\nscheme = "semi_synchronous"\nloss_limit_zones = 1\n'
    case = read(tmp_path, text).case
    assert case.failures.repair_chain is RepairChain.INDIVIDUAL
    assert case.failures.rack_failures is RackFailures.PER_RACK
    assert isinstance(case.recovery, SemiSynchronous)
    assert case.recovery.checkpoint.clock is FailureClock.RUNNING
    assert case.hardware is not None
    # With 2 instead of 4 idle GPUs of 16, 9 % of the power is free instead of 21 %.
    assert case.hardware.gain_of(case.strategies[0], 16) == pytest.approx(1 + 0.5 * (1.09**0.5 - 1))
    assert case.strategies[0].spare_blocks == 2


def test_elastic_recovery_needs_no_checkpoint_section(tmp_path: Path) -> None:
    start, end = MINIMAL.index("[checkpoint]"), MINIMAL.index("[[strategy]]")
    text = MINIMAL[:start] + '[recovery]\nscheme = "elastic"\ndown_seconds = 30\n' + MINIMAL[end:]
    assert read(tmp_path, text).case.recovery == Elastic(down_seconds=30.0)


HARDWARE = "[hardware]\nspare_gpus_per_rack = 2\npower_limit_ratio = 1.1"

WRONG = [
    ("mtbf_tray_hours = 1000", "mtbf_tray_hour = 1000", "failures.mtbf_tray_hour is not known.*mtbf_tray_hours"),
    ("[cluster]", "[clusters]", "clusters is not known.*cluster"),
    ("zones = 1", "zones = 0", "cluster.zones = 0: must be greater than 0"),
    ("zones = 1", "zones = 1.5", "cluster.zones = 1.5: must be a whole number"),
    ("zones = 1", "zones = true", "cluster.zones = True: must be a whole number"),
    ("zones = 1", "", "cluster.zones: is missing"),
    ("gpus_per_tray = 2", "gpus_per_tray = 3", "cluster.gpus_per_tray = 3: must divide gpus_per_rack = 16"),
    ("mttr_hours = 10", "mttr_hours = -1", "failures.mttr_hours = -1: must be greater than 0"),
    ("mttr_hours = 10", "mttr_hours = nan", "failures.mttr_hours = nan: must be a finite number"),
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
    ("[cluster]", "", r"zones: is a key of \[cluster\], whose line is missing above it"),
    ("spare_gpus = 2", "spare_gpus = 2\nhardware_gain = 100", "hardware_gain = 100: must be at most 1.14286"),
    ("[[strategy]]", "[placement]\ngroup_gpus = 126\n[[strategy]]", "placement.group_gpus = 126: .*only 8"),
    (
        "[[strategy]]\nblock_gpus = 16",
        "[placement]\ngroup_gpus = 28\n[[strategy]]\nspare_blocks = 1\nblock_gpus = 16",
        "spare_blocks = 1: leaves 7 working blocks",
    ),
    ("[[strategy]]", "[hardware]\n[[strategy]]", "hardware.spare_gpus_per_rack: is missing"),
    ("[[strategy]]", f"{HARDWARE}\n[[strategy]]", "hardware: give either gain or exposed_communication"),
    ("[[strategy]]", f"{HARDWARE}\ngain = 1.06\n[[strategy]]", "hardware.gain = 1.06: must lie between 1 and 1.0488"),
    (
        "[[strategy]]",
        "[hardware]\nspare_gpus_per_rack = 16\npower_limit_ratio = 1.1\ngain = 1\n[[strategy]]",
        "hardware.spare_gpus_per_rack = 16: must be fewer than cluster.gpus_per_rack = 16",
    ),
    (
        "[[strategy]]",
        "[hardware]\nspare_gpus_per_rack = 2\npower_limit_ratio = 1.2\ngain = 1\n[[strategy]]",
        "hardware.power_limit_ratio = 1.2: must be at most 1.14286",
    ),
    ("spare_gpus = 2", "spare_gpus = 2\nhardware_gain = 0", r"strategy\[0\].hardware_gain = 0: must be greater than 0"),
    (
        "[[strategy]]",
        "[[strategy]]\nblock_gpus = 16\nspare_gpus = 2\n[[strategy]]",
        r"strategy\[1\] = 16/14: is strategy\[0\] again",
    ),
    ("mttr_hours = 10", "mttr_hours = inf", "failures.mttr_hours = inf: must be a finite number"),
    ("mttr_hours = 10", "mttr_hours = 1e300", r"failures.mttr_hours = 1e\+300: must be a finite number, of at most"),
    ("mttr_hours = 10", "mttr_hours = 1" + "0" * 400, "failures.mttr_hours = 10+...: must be a finite number"),
    ("mttr_hours = 10", "mttr_hours = 1" + "0" * 5000, "is not valid TOML"),
    ("mttr_hours = 10", "mttr_hours = 5e-324", "failures.mttr_hours = 5e-324: must be 0, or at least 1e-15"),
    ("racks_per_zone = 8", "racks_per_zone = 1" + "0" * 22, "cluster.racks_per_zone = 10+: must be at most 1e"),
    ("racks_per_zone = 8", "racks_per_zone = 10000000", "must be at most 10,000,000 GPUs"),
    ("save_seconds = 10", "save_seconds = 601", "checkpoint.save_seconds = 601: must be at most period_seconds = 600"),
    ("zones = 1", "zones = " + "[" * 100_000, "too deep"),
    ("zones = 1", 'zones = 1\n"a\\nb" = 1', "'cluster.a.+b' is not known"),
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
    ("[[strategy]]", "strategy = 3\n[x]", "x is not known"),
    ("zones = 1", "zones = = 1", "is not valid TOML"),
]


@pytest.mark.parametrize(("good", "bad", "message"), WRONG, ids=[str(index) for index in range(len(WRONG))])
def test_bad_input_is_reported_in_one_line_with_key_and_rule(tmp_path: Path, good: str, bad: str, message: str) -> None:
    assert good in MINIMAL
    with pytest.raises(BadInputError, match=message) as error:
        read(tmp_path, MINIMAL.replace(good, bad, 1))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "cluster.toml"))


def test_a_missing_strategy_checkpoint_or_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"at least one \[\[strategy\]\]"):
        read(tmp_path, MINIMAL[: MINIMAL.index("[[strategy]]")])
    start, end = MINIMAL.index("[checkpoint]"), MINIMAL.index("[[strategy]]")
    with pytest.raises(BadInputError, match="checkpoint: this section is missing"):
        read(tmp_path, MINIMAL[:start] + MINIMAL[end:])
    with pytest.raises(BadInputError, match="cannot be read: No such file"):
        read_case(tmp_path / "none.toml")


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeff" + MINIMAL).case == read(tmp_path, MINIMAL).case


NUMBERS = (
    "0",
    "1",
    "2",
    "3",
    "8",
    "16",
    "1e22",
    "10" * 11,
    "1e15",
    "1e-15",
    "5e-324",
    "-1",
    "0.5",
    "1.05",
    "inf",
    "nan",
)
WORDS = ('"x"', '"running"', '"elastic"', '"individual"', '"per_rack"', "true", "[]", "{}", "[[1]]", "2020-01-01", "")
OPTIONAL = (
    "[placement]\ngroup_gpus = 28",
    "[hardware]\nspare_gpus_per_rack = 2\npower_limit_ratio = 1.1\ngain = 1.03",
    "[model]\nalpha = 0.1\nbaseline_tensor_parallel = 8",
    '[recovery]\nscheme = "semi_synchronous"\nloss_limit_zones = 1',
    '[recovery]\nscheme = "elastic"\ndown_seconds = 30',
    "[standbys]\nnode_gpus = 2\ndown_seconds_with = 1\ndown_seconds_without = 9",
    "[[strategy]]\nblock_gpus = 8\nspare_gpus = 0\nspare_blocks = 2\nhardware_gain = 1.1",
)


@pytest.fixture(scope="module")
def commands() -> BuiltCommands:
    return BuiltCommands(app)


@st.composite
def files(draw: st.DrawFn) -> str:
    """Return the minimal case with more sections and with some values replaced, possibly by invalid ones."""
    lines = [
        *MINIMAL.strip().splitlines(),
        *"\n".join(draw(st.lists(st.sampled_from(OPTIONAL), max_size=3))).splitlines(),
    ]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        lines[at] = f"{lines[at].split('=')[0]}= {draw(st.sampled_from(NUMBERS + WORDS))}"
    return "\n".join(lines)


@settings(
    derandomize=True, deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=files() | st.text(max_size=40), command=st.sampled_from(["plan", "map"]))
def test_any_input_succeeds_or_is_refused_in_one_line(
    tmp_path: Path, commands: BuiltCommands, text: str, command: str
) -> None:
    path = tmp_path / "any.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    options = ["--points", "3"] if command == "map" else []
    code, _, complaint = commands.run(command, str(path), *options)
    assert code == 0 or (code == EXIT_BAD_INPUT and len(complaint.splitlines()) == 1), text
