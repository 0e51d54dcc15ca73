"""Tests of `holdfast audit`: exit code 0 for a consistent journal, 1 for an inconsistent line, 2 for another file."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.errors import EXIT_BAD_INPUT, EXIT_FAILED, BadInputError
from tests.simulation.cluster import SimCluster
from tests.simulation.faults.plans import FaultPlan


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cluster = SimCluster(FaultPlan(seed=1, steps=4, start_spread=0.0))
    cluster.run()
    path = tmp_path_factory.mktemp("events") / "events.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in cluster.world.journal.events))
    return path


def audit(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["audit", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_a_complete_journal_is_reported_as_sound(journal: Path) -> None:
    code, said = audit(str(journal))
    assert code == 0
    lines = said.splitlines()
    assert lines[0].startswith("sim: finished; ")
    assert lines[0].endswith("4 steps, 96 samples")
    assert lines[1].startswith("4 steps had each micro-batch exactly once")
    assert lines[-1] == "sound"


def test_json_output_has_the_verdict_the_steps_and_the_findings(journal: Path) -> None:
    code, said = audit(str(journal), "--json")
    document = json.loads(said)
    assert code == 0
    assert (document["sound"], document["steps"], document["proven"], document["findings"]) == (True, 4, 4, [])


def test_an_edited_line_is_reported_with_its_number(journal: Path, tmp_path: Path) -> None:
    lines = journal.read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if '"step":3' in line)
    event = json.loads(lines[at])
    event["sample_hashes"] += 1
    edited = tmp_path / "edited.jsonl"
    edited.write_text("".join([*lines[:at], json.dumps(event) + "\n", *lines[at + 1 :]]))
    code, said = audit(str(edited))
    assert code == EXIT_FAILED
    assert f"line {at + 1} (event {event['seq']}): step 3 is not made of each of its 6 micro-batches once" in said
    assert said.splitlines()[-1] == "NOT SOUND: the events have 1 error, which is described above"
    (finding,) = json.loads(audit(str(edited), "--json")[1])["findings"]
    assert (finding["line"], finding["about"]) == (at + 1, "samples")


def test_truncation_is_reported_and_long_lists_are_shortened(journal: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(journal.read_bytes()[:-10])
    code, said = audit(str(torn))
    assert code == EXIT_FAILED
    assert "it ends in the middle" in said
    noise = tmp_path / "noise.jsonl"
    noise.write_bytes(journal.read_bytes() + b"{}\n" * 30)
    code, said = audit(str(noise))
    assert code == EXIT_FAILED
    assert "and 10 more; --json has all of them" in said


def test_a_file_that_is_not_a_journal_is_bad_input(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("text", b"hello\nworld\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadInputError, match="holds no event: give the file that --events wrote") as caught:
            audit(str(tmp_path / name))
        assert caught.value.exit_code == EXIT_BAD_INPUT
    with pytest.raises(BadInputError, match="cannot be read as an event file: No such file"):
        audit(str(tmp_path / "nowhere"))
