"""The inputs of `holdfast simulate`: a cluster's file, then `--set`, then options. Later ones take precedence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.cli.planner.spares.toml import HardwareFile, node_of, read_hardware
from holdfast.cli.spec_options import parse_settings
from holdfast.documents import Given, build_struct
from holdfast.errors import BadInputError
from holdfast.planner.fleet.case import FleetCase, check_case
from holdfast.planner.fleet.scale import OF_NO_EFFECT, SIZES

#: the options that set keys, by key
OPTIONS = {"nodes": "--nodes", "mtbf_hours": "--mtbf", "mttr_hours": "--mttr", "standbys": "--standbys"}


def read_case(
    path: Path | None,
    pairs: Sequence[str],
    options: Mapping[str, str],
    *,
    scale: bool = False,
    drawing: Mapping[str, float | None] | None = None,
) -> FleetCase:
    """Return the case to simulate: the defaults, replaced by the cluster's file, then by `pairs`, then by `options`.

    Args:
        path: a cluster's file, or None.
        pairs: `KEY=VALUE` of `--set`.
        options: values of command-line options by key.
        scale: show recoveries in jobs of all sizes. A size, and values without effect on that, are refused.
        drawing: the options about how failures are drawn, None for one that is not given. They only serve to refuse
            them with `scale`.

    Raises:
        BadInputError: one of them cannot be used, or they do not fit together.
    """
    said = parse_settings(pairs, FleetCase, "recovery.lease_s=5", "docs/scale.md")
    said |= {key: Given(value, OPTIONS[key], text=True) for key, value in options.items()}
    if scale:
        _refuse_what_has_no_effect(said, drawing or {})
    return check_case(build_struct(FleetCase, (_given_hardware(path) if path is not None else {}) | said))


def _refuse_what_has_no_effect(said: Mapping[str, Given], drawing: Mapping[str, float | None]) -> None:
    """Refuse a size, keys and options that do not change what --scale shows.

    Raises:
        BadInputError: one of them is given; the message names it.
    """
    sizes = f"jobs of {SIZES[0]} to {SIZES[-1]:,} nodes"
    if size := said.get("nodes"):
        raise BadInputError(f"{size.name} is {size.value}: --scale shows {sizes}; leave one of them out")
    idle = [(given.name, given.value) for key, given in said.items() if {key, key.split(".")[0]} & {*OF_NO_EFFECT}]
    idle += [(name, value) for name, value in drawing.items() if value is not None]
    for name, value in idle:
        raise BadInputError(
            f"{name} is {value}: --scale shows how long a recovery takes in {sizes}, which that does not change; "
            "leave one of them out"
        )


def _given_hardware(path: Path) -> dict[str, Given]:
    """Return the values of a cluster's file, by key. Its job takes all nodes.

    Raises:
        BadInputError: the file cannot be read, or its values do not fit together.
    """
    file = read_hardware(path)
    try:
        values = _values(file)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None
    return {key: Given(value, f"{path}: {key}") for key, value in values.items()}


def _values(file: HardwareFile) -> dict[str, float]:
    """Return the keys of a case that a hardware file sets: nodes, workers, racks, MTBF, MTTR and checkpoint times.

    Raises:
        BadInputError: nodes do not divide a rack.
    """
    cluster, failures = file.cluster, file.failures
    node_gpus, mtbf = node_of(cluster, failures, file.standbys)
    if cluster.gpus_per_rack % node_gpus:
        raise BadInputError(f"standbys.node_gpus = {node_gpus}: must divide gpus_per_rack = {cluster.gpus_per_rack}")
    values: dict[str, float] = {
        "nodes": cluster.gpus // node_gpus,
        "workers_per_node": node_gpus,
        "rack_nodes": cluster.gpus_per_rack // node_gpus,
        "mtbf_hours": mtbf,
        "mtbf_rack_hours": float(failures.mtbf_rack_hours),
        "mttr_hours": float(failures.mttr_hours),
    }
    if file.checkpoint is not None:
        values |= {
            "checkpoint.period_s": float(file.checkpoint.period_seconds),
            "checkpoint.save_s": float(file.checkpoint.save_seconds),
            "restart.detect_s": float(file.checkpoint.detect_seconds),
            "restart.restart_s": float(file.checkpoint.restart_seconds),
        }
    return values
