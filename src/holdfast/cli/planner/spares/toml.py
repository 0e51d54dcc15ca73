"""Reads a sparing case from TOML, strictly: unknown keys are errors, with the nearest known one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast

from holdfast.documents import check_known, load_toml, shorten
from holdfast.errors import BadInputError
from holdfast.planner.reliability.sparing.block_mtbf import RepairChain
from holdfast.planner.reliability.sparing.case import (
    Cluster,
    FailureModel,
    Hardware,
    Model,
    Placement,
    SparingCase,
    SparingStrategy,
)
from holdfast.planner.reliability.sparing.recovery import (
    Checkpoint,
    Elastic,
    RackFailures,
    RecoveryScheme,
    SemiSynchronous,
    Synchronous,
)
from holdfast.planning.checkpointing import FailureClock

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)
Reader = Callable[[str, Any], Any]
#: No hours, seconds or counts are more, or less but for 0: products of a few stay far from over- and underflow.
MOST, LEAST = 1e15, 1e-15


class Scheme(StrEnum):
    """Values of `recovery.scheme`."""

    SYNCHRONOUS = "synchronous"
    SEMI_SYNCHRONOUS = "semi_synchronous"
    ELASTIC = "elastic"


@dataclass(frozen=True, kw_only=True, slots=True)
class StandbySection:
    """The TOML's `[standbys]`."""

    node_gpus: int | None = None
    mtbf_node_hours: float | None = None
    down_seconds_with: float | None = None
    down_seconds_without: float | None = None


def node_of(cluster: Cluster, failures: FailureModel, standbys: StandbySection) -> tuple[int, float]:
    """Return how many GPUs a node has, and its MTBF in hours: by default a tray's.

    Raises:
        BadInputError: nodes of that size do not make up the cluster.
    """
    gpus = cluster.gpus_per_tray if standbys.node_gpus is None else standbys.node_gpus
    if gpus < 1 or cluster.gpus % gpus:
        raise BadInputError(f"standbys.node_gpus = {gpus}: must divide the cluster's {cluster.gpus} GPUs")
    mtbf = standbys.mtbf_node_hours
    return gpus, float(failures.mtbf_tray_hours) * cluster.gpus_per_tray / gpus if mtbf is None else mtbf


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareFile:
    """What a TOML file says of a cluster, whatever is asked of it."""

    cluster: Cluster
    failures: FailureModel
    checkpoint: Checkpoint | None
    standbys: StandbySection


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseFile:
    """All that a TOML file says."""

    case: SparingCase
    checkpoint: Checkpoint | None
    standbys: StandbySection


def read_case(path: Path) -> CaseFile:
    """Read a sparing case.

    Raises:
        BadInputError: naming the file, the key and the rule.
    """
    return _read(path, _case_file)


def read_hardware(path: Path) -> HardwareFile:
    """Read a cluster; what else a sparing case consists of may be there, and is not looked at.

    Raises:
        BadInputError: naming the file, the key and the rule.
    """
    return _read(path, _hardware)


def _read(path: Path, made_of: Callable[[dict[str, Any]], T]) -> T:
    """Read a TOML file, check its section names, and return `made_of` of it. Errors name the file."""
    document = load_toml(path)
    try:
        for name in document:
            _check_section(name)
        return made_of(document)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None


def number(key: str, value: Any) -> float:
    """Return a TOML number as float. Raises `BadInputError` for other values and sizes beyond `LEAST` or `MOST`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInputError(f"{key} = {shorten(value)}: must be a number")
    if not abs(value) <= MOST:
        raise BadInputError(f"{key} = {shorten(value)}: must be a finite number, of at most {MOST:g}")
    if 0 < abs(value) < LEAST:
        raise BadInputError(f"{key} = {shorten(value)}: must be 0, or at least {LEAST:g}")
    return float(value)


def integer(key: str, value: Any) -> int:
    """Return a TOML integer. Raises `BadInputError` for other values, or beyond `MOST`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInputError(f"{key} = {shorten(value)}: must be a whole number")
    if abs(value) > MOST:
        raise BadInputError(f"{key} = {shorten(value)}: must be at most {MOST:g}")
    return value


def choice(kind: type[E]) -> Callable[[str, Any], E]:
    """Return a function that reads one of an enumeration's values, or raises `BadInputError` with all of them."""

    def read(key: str, value: Any) -> E:
        """Return the member with this value. Raises `BadInputError` that names the key."""
        try:
            return kind(value)
        except ValueError:
            allowed = " or ".join(f'"{member}"' for member in kind)
            raise BadInputError(f"{key} = {shorten(value)}: must be {allowed}") from None

    return read


CLUSTER: dict[str, Reader] = dict.fromkeys(("zones", "racks_per_zone", "gpus_per_rack", "gpus_per_tray"), integer)
FAILURES: dict[str, Reader] = {
    "mtbf_tray_hours": number,
    "mtbf_rack_hours": number,
    "mttr_hours": number,
    "repair_chain": choice(RepairChain),
    "rack_failures": choice(RackFailures),
}
CHECKPOINT: dict[str, Reader] = {
    "period_seconds": number,
    "save_seconds": number,
    "detect_seconds": number,
    "restart_seconds": number,
    "clock": choice(FailureClock),
}
PLACEMENT: dict[str, Reader] = {"group_gpus": integer}
HARDWARE: dict[str, Reader] = {
    "spare_gpus_per_rack": integer,
    "power_limit_ratio": number,
    "gain": number,
    "exposed_communication": number,
}
MODEL: dict[str, Reader] = {"alpha": number, "baseline_tensor_parallel": integer}
STRATEGY: dict[str, Reader] = {
    "block_gpus": integer,
    "spare_gpus": integer,
    "spare_blocks": integer,
    "hardware_gain": number,
}
RECOVERY: dict[str, Reader] = {"scheme": choice(Scheme), "loss_limit_zones": integer, "down_seconds": number}
STANDBYS: dict[str, Reader] = {
    "node_gpus": integer,
    "mtbf_node_hours": number,
    "down_seconds_with": number,
    "down_seconds_without": number,
}
SECTIONS = (
    "cluster",
    "failures",
    "checkpoint",
    "placement",
    "hardware",
    "model",
    "recovery",
    "standbys",
    "strategy",
)


#: The keys of the sections that every case needs.
_NEEDED = {"cluster": CLUSTER, "failures": FAILURES, "checkpoint": CHECKPOINT, "strategy": STRATEGY}


def _check_section(name: str) -> None:
    """Check that a top-level name of the file is a section.

    Raises:
        BadInputError: it is not; for a key of a section, the message names the section.
    """
    if name not in SECTIONS:
        for section, keys in _NEEDED.items():
            if name in keys:
                header = f"[[{section}]]" if section == "strategy" else f"[{section}]"
                raise BadInputError(f"{name}: is a key of {header}, whose line is missing above it")
    check_known(name, SECTIONS, name)


def _hardware(document: dict[str, Any]) -> HardwareFile:
    needed = ("period_seconds", "save_seconds", "detect_seconds", "restart_seconds")
    return HardwareFile(
        checkpoint=_optional(document, "checkpoint", CHECKPOINT, needed, Checkpoint),
        cluster=Cluster(**_section(document, "cluster", CLUSTER, CLUSTER)),
        failures=FailureModel(
            **_section(document, "failures", FAILURES, ("mtbf_tray_hours", "mtbf_rack_hours", "mttr_hours"))
        ),
        standbys=_optional(document, "standbys", STANDBYS, (), StandbySection) or StandbySection(),
    )


def _case_file(document: dict[str, Any]) -> CaseFile:
    """Return the whole case of a document. Raises `BadInputError` for a missing or wrong key."""
    hardware = _hardware(document)
    case = SparingCase(
        cluster=hardware.cluster,
        failures=hardware.failures,
        recovery=_recovery(document, hardware.checkpoint),
        placement=_optional(document, "placement", PLACEMENT, PLACEMENT, Placement),
        hardware=_optional(document, "hardware", HARDWARE, ("spare_gpus_per_rack", "power_limit_ratio"), Hardware),
        model=_optional(document, "model", MODEL, MODEL, Model),
        strategies=_strategies(document),
    )
    return CaseFile(case=case, checkpoint=hardware.checkpoint, standbys=hardware.standbys)


def _recovery(document: dict[str, Any], checkpoint: Checkpoint | None) -> RecoveryScheme:
    """Return the recovery scheme, by default synchronous checkpoints.

    Raises:
        BadInputError: a key does not belong to the scheme, or its own key or the checkpoint section is missing.
    """
    given = _section(document, "recovery", RECOVERY, ("scheme",)) if "recovery" in document else {}
    scheme = given.pop("scheme", Scheme.SYNCHRONOUS)
    own = {Scheme.SEMI_SYNCHRONOUS: "loss_limit_zones", Scheme.ELASTIC: "down_seconds"}.get(scheme)
    for key in given:
        if key != own:
            raise BadInputError(f'recovery.{key}: has no meaning with scheme = "{scheme}": remove it')
    if own is not None and own not in given:
        raise BadInputError(f'recovery.{own}: is missing, and scheme = "{scheme}" needs it')
    if scheme is Scheme.ELASTIC:
        return Elastic(**given)
    if checkpoint is None:
        raise BadInputError(f'checkpoint: this section is missing, and scheme = "{scheme}" needs it')
    return Synchronous(checkpoint=checkpoint) if own is None else SemiSynchronous(checkpoint=checkpoint, **given)


def _strategies(document: dict[str, Any]) -> tuple[SparingStrategy, ...]:
    """Return the strategies, at least one. Raises `BadInputError` that names the wrong one by index."""
    given = document.get("strategy", [])
    tables = cast(list[object], given) if isinstance(given, list) else []
    if not tables:
        raise BadInputError("strategy: at least one [[strategy]] is needed")
    strategies: list[SparingStrategy] = []
    for index, table in enumerate(tables):
        name = f"strategy[{index}]"
        values = _values(name, table, STRATEGY, ("block_gpus", "spare_gpus"))
        try:
            strategies.append(SparingStrategy(**values))
        except BadInputError as error:
            raise BadInputError(str(error).replace("strategy.", f"{name}.", 1)) from None
    return tuple(strategies)


def _optional(
    document: dict[str, Any], name: str, readers: dict[str, Reader], needed: Iterable[str], kind: Callable[..., T]
) -> T | None:
    return kind(**_section(document, name, readers, needed)) if name in document else None


def _section(document: dict[str, Any], name: str, readers: dict[str, Reader], needed: Iterable[str]) -> dict[str, Any]:
    """Return the checked values of a section of the file by key.

    Args:
        readers: check and return the value of each known key.
        needed: the keys that must be given.

    Raises:
        BadInputError: the section is missing or not a table, a key is unknown or missing, or a value is wrong.
    """
    if name not in document:
        raise BadInputError(f"{name}: this section is missing")
    return _values(name, document[name], readers, needed)


def _values(name: str, table: Any, readers: dict[str, Reader], needed: Iterable[str]) -> dict[str, Any]:
    """Return the checked values of a table by key.

    Args:
        name: the section, for messages.
        readers: check and return the value of each known key.
        needed: the keys that must be given.

    Raises:
        BadInputError: it is not a table, has an unknown key, lacks one of `needed`, or a value is wrong.
    """
    if not isinstance(table, dict):
        raise BadInputError(f"{name} = {shorten(table)}: must be a section")
    values = cast(dict[str, Any], table)
    for key in values:
        check_known(key, readers, f"{name}.{key}")
    for key in needed:
        if key not in values:
            raise BadInputError(f"{name}.{key}: is missing")
    return {key: readers[key](f"{name}.{key}", value) for key, value in values.items()}
