"""A site's file of failure classes: how it is read, and the errors for a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.control.failure_classes import read_rules
from holdfast.errors import BadInputError
from holdfast.protocol.failures import MAX_RULES, Detector, FailureRule, Severity

GOOD = """# this site's machines
[[class]]
pattern = "BMC: fan .* failed"
status = "fan_failed"
severity = 1

[[class]]
status = 'slot_\\1'
pattern = 'riser (\\d+)'
severity = 2
detector = "exception"
"""


def written(folder: Path, text: str) -> str:
    path = folder / "classes.toml"
    path.write_text(text)
    return str(path)


def test_rules_are_read_in_file_order(tmp_path: Path) -> None:
    assert read_rules(written(tmp_path, GOOD)) == (
        FailureRule(pattern="BMC: fan .* failed", status="fan_failed", severity=Severity.NODE),
        FailureRule(pattern=r"riser (\d+)", status=r"slot_\1", severity=Severity.PROCESS, detector=Detector.EXCEPTION),
    )
    assert read_rules(written(tmp_path, "")) == ()
    assert read_rules("") == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[class]", "is not valid TOML"),
        ("classes = 1", "classes is not known; the nearest one is class"),
        ("class = 1", "class is 1: write each rule under a [[class]] of its own"),
        (
            GOOD.replace("fan .*", "fan ("),
            "line 3: the pattern 'BMC: fan ( failed' is not a regular expression: missing )",
        ),
        (
            GOOD.replace("fan .*", "[[a]"),
            "line 3: the pattern 'BMC: [[a] failed' may mean something else one day: Possible nested set at position 6",
        ),
        (GOOD.replace("riser (", "x (riser ("), "line 9: the pattern 'x (riser (\\\\d+)' is not a regular"),
        (
            GOOD.replace("'riser (\\d+)'", '"old BMC: fan failed"').replace("\\1", "x").replace(" .*", ""),
            "line 9: it can",
        ),
        (GOOD.replace("severity = 1", "severity = 4"), "line 3: severity is 4: it must be 1 (the node goes out), 2"),
        (GOOD.replace("severity = 1", 'severity = "1"'), "line 3: severity is '1': it must be 1"),
        (GOOD.replace('"fan_failed"', '"Fan failed"'), "line 3: status is 'Fan failed': it must be a name"),
        (GOOD.replace('"exception"', '"me"'), "line 9: detector is 'me': it must be one of node_health, process, exc"),
        (GOOD.replace("\\1", "\\2"), "line 9: the status 'slot_\\\\2' names a group that the pattern does not have"),
        (GOOD.replace("severity = 1\n", ""), "line 3: severity is missing: it must be 1"),
        (GOOD.replace("pattern =", "patern ="), "patern is not known; the nearest one is pattern"),
        (
            '[[class]]\npattern = ""\nstatus = "a"\nseverity = 1',
            "line 2: pattern is '': it must be a regular expression",
        ),
        ("class = [{pattern = '(', status = 'a', severity = 1}]", "rule 1: the pattern '(' is no"),
        (
            "".join(f'[[class]]\npattern = "p{n:03}"\nstatus = "s"\nseverity = 1\n' for n in range(MAX_RULES + 1)),
            f"has {MAX_RULES + 1} rules: at most {MAX_RULES}",
        ),
    ],
)
def test_an_error_in_the_file_is_reported_in_one_line_with_its_position(tmp_path: Path, text: str, why: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(BadInputError) as raised:
        read_rules(path)
    assert str(raised.value).startswith(path)
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot be read: No such file"):
        read_rules(str(tmp_path / "nowhere.toml"))
