"""What `holdfast simulate` is asked, put together: a cluster's file, then `--set`, then options; the later one wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.cli.spares.toml import HardwareFile, node_of, read_hardware
from holdfast.cli.spec_options import given_settings
from holdfast.documents import Given, build
from holdfast.errors import BadInputError
from holdfast.simulation.fleet.case import FleetCase, checked
from holdfast.simulation.fleet.scale import SIZES

#: what an option is called that sets a key
OPTIONS = {"nodes": "--nodes", "mtbf_hours": "--mtbf", "mttr_hours": "--mttr", "standbys": "--standbys"}


def given_case(
    path: Path | None, pairs: Sequence[str], options: Mapping[str, str], *, scale: bool = False
) -> FleetCase:
    """Return the case.

    Args:
        path: of a cluster. pairs: `KEY=VALUE`. options: values by key.
        scale: jobs of all sizes are to be shown, so that none can be asked for.

    Raises:
        BadInputError: something is wrong with one of them, or they do not fit together.
    """
    said = given_settings(pairs, FleetCase, "recovery.lease_s=5")
    said |= {key: Given(value, OPTIONS[key], text=True) for key, value in options.items()}
    if scale and (size := said.get("nodes")):
        sizes = f"jobs of {SIZES[0]} to {SIZES[-1]:,} nodes"
        raise BadInputError(f"{size.name} is {size.value}: --scale shows {sizes}; leave one of them out")
    return checked(build(FleetCase, (_given_hardware(path) if path is not None else {}) | said))


def _given_hardware(path: Path) -> dict[str, Given]:
    """Return what a cluster's file says, by key; its job takes all nodes."""
    file = read_hardware(path)
    try:
        values = _values(file)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None
    return {key: Given(value, f"{path}: {key}") for key, value in values.items()}


def _values(file: HardwareFile) -> dict[str, float]:
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
