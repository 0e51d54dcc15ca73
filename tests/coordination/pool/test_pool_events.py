"""Tests of the contract of the pool's events, which other tools read: fields may only be added."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
from played_pool import PlayedPool

from holdfast.protocol.pool.events import AnyPoolEvent, NodeGranted
from places import ROOT

COMMON = {"time", "pool", "term", "seq"}
CONTRACT = {
    "pool_started": ["url", "pid", "policy", "reserve", "format"],
    "node_granted": ["node", "job", "grant", "standby"],
    "role_changed": ["node", "job", "grant", "standby", "by"],
    "node_released": ["node", "job", "grant", "by"],
    "node_added": ["node", "rack", "zone"],
    "node_forgotten": ["node", "why"],
    "node_drained": ["node"],
    "node_undrained": ["node"],
    "job_submitted": ["job", "submission", "min_nodes", "max_nodes"],
    "job_admitted": ["job", "nodes", "waited_s"],
    "job_resized": ["job", "from_nodes", "to_nodes", "lost", "why"],
    "job_suspended": ["job", "preempted"],
    "job_resumed": ["job"],
    "job_ended": ["job", "state", "why"],
    "plan_decided": [
        "nodes",
        "shares",
        "waiting",
        "trigger",
        "before",
        "source",
        "gain",
        "cost",
        "next_best",
        "given_up",
        "starved",
        "reserve",
        "reserve_why",
    ],
    "store_returned": ["away_s"],
    "journal_repaired": ["from_seq", "to_seq"],
}


def test_the_contract_lists_every_event_and_field() -> None:
    found = {str(kind.__struct_config__.tag): kind.__struct_fields__ for kind in get_args(AnyPoolEvent)}
    assert {name: [field for field in fields if field not in COMMON] for name, fields in found.items()} == CONTRACT
    assert all(set(fields) > COMMON - {"pool"} for fields in found.values())


def test_the_documentation_lists_exactly_the_events_and_their_fields() -> None:
    page = (ROOT / "docs" / "pool.md").read_text().split("\n## Its events")[1]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.M))
    assert {name: re.findall(r"`(\w+)`", fields) for name, fields in rows.items()} == CONTRACT
    assert all(f"`{field}`" in page for field in COMMON)


def test_every_event_round_trips_as_one_json_object() -> None:
    pool = PlayedPool(nodes=2)
    pool.submit("one", least=2)
    pool.submit("two")
    for event in pool.events:
        line = msgspec.json.encode(event)
        assert {"event", *COMMON} <= msgspec.json.decode(line).keys()
        assert msgspec.json.decode(line, type=AnyPoolEvent) == event
    assert pool.of_kind(NodeGranted)[0].job == "one"
