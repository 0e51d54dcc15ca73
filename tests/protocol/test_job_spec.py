"""The job's struct: what follows from what its user has said."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import inspect

from holdfast.documents import keys_of
from holdfast.protocol.job_spec import MOST, CheckpointSpec, JobSpec, OutputSpec, RecoverySpec


@pytest.mark.parametrize(
    ("script", "name"),
    [("train.py", "train"), ("a/b c.py", "b-c"), (".hidden.py", "hidden"), ("", "job"), ("ö.py", "job")],
)
def test_a_job_without_a_name_is_named_after_its_script(script: str, name: str) -> None:
    assert JobSpec(script=script).settled("/here").name == name
    assert JobSpec(script=script, name="mine").settled("/here").name == "mine"


def test_paths_are_made_absolute() -> None:
    spec = JobSpec(script="train.py", checkpoint=CheckpointSpec(dir="/kept"), output=OutputSpec(events="e.jsonl"))
    settled = spec.settled("/here")
    assert (settled.script, settled.checkpoint.dir, settled.output.events) == (
        "/here/train.py",
        "/kept",
        "/here/e.jsonl",
    )
    assert JobSpec().settled("/here").checkpoint.dir == ""


def test_a_job_starts_with_its_minimum_number_of_nodes_or_with_all() -> None:
    assert JobSpec(max_nodes=5).nodes_to_begin == 5
    assert JobSpec(min_nodes=2, max_nodes=5).nodes_to_begin == 2


def test_only_the_restart_policy_restarts_all_workers() -> None:
    assert RecoverySpec(on_node_failure="restart-all").restarts_all
    assert not RecoverySpec().restarts_all


def test_a_job_spec_is_unchanged_after_a_json_round_trip() -> None:
    spec = JobSpec(script="train.py", args=("--steps", "5"), recovery=RecoverySpec(join_window=2.5))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=JobSpec) == spec


def test_every_integer_of_a_job_spec_fits_into_messagepack() -> None:
    """One that MessagePack cannot take ended a pool's server, which had a client's job to write down."""
    for key in keys_of(JobSpec).values():
        kinds = key.kind.types if isinstance(key.kind, inspect.UnionType) else (key.kind,)
        for kind in (one.item_type if isinstance(one, inspect.VarTupleType) else one for one in kinds):
            kind = kind.type if isinstance(kind, inspect.Metadata) else kind
            if isinstance(kind, inspect.IntType):
                assert (kind.ge or 0) >= -MOST, key.name
                assert kind.le is not None, key.name
                assert kind.le <= MOST, key.name
