"""What a sparing question consists of: the cluster, how it fails, the job, and the strategies to compare.

The field names are the keys of the TOML that the command line reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import BadInputError
from holdfast.reliability.arrays import (
    Floats,
    as_floats,
    require_fraction,
    require_not_negative,
    require_positive,
)
from holdfast.reliability.block_mtbf import RepairChain
from holdfast.reliability.gains import hardware_gain
from holdfast.reliability.recovery import RackFailures, RecoveryScheme, Synchronous, check_loss_limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """B sparing zones of equal racks; a tray is the smallest unit that fails on its own."""

    zones: int
    racks_per_zone: int
    gpus_per_rack: int
    gpus_per_tray: int

    def __post_init__(self) -> None:
        for key in ("zones", "racks_per_zone", "gpus_per_rack", "gpus_per_tray"):
            require_positive(f"cluster.{key}", getattr(self, key))
        if self.gpus_per_rack % self.gpus_per_tray:
            raise BadInputError(
                f"cluster.gpus_per_tray = {self.gpus_per_tray}: must divide gpus_per_rack = {self.gpus_per_rack}"
            )

    @property
    def gpus(self) -> int:
        """All GPUs, spare ones included."""
        return self.zones * self.racks_per_zone * self.gpus_per_rack


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """How trays and racks fail and return. Hours; arrays broadcast."""

    mtbf_tray_hours: Floats
    mtbf_rack_hours: Floats
    mttr_hours: Floats
    repair_chain: RepairChain = RepairChain.TOGETHER
    rack_failures: RackFailures = RackFailures.PER_BLOCK

    def __post_init__(self) -> None:
        for key in ("mtbf_tray_hours", "mtbf_rack_hours", "mttr_hours"):
            require_positive(f"failures.{key}", getattr(self, key))


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """GPUs at work that must lie in one sparing zone together."""

    group_gpus: int

    def __post_init__(self) -> None:
        require_positive("placement.group_gpus", self.group_gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Gain of strategies with spare trays: measured (`gain`), or Eq. 8 from the two other fields."""

    gain: float | None = None
    power_limit_ratio: float | None = None
    exposed_communication: float | None = None

    def __post_init__(self) -> None:
        parts = (self.power_limit_ratio, self.exposed_communication)
        if (self.gain is None) == (parts == (None, None)) or (self.gain is None and None in parts):
            raise BadInputError("hardware: give either gain, or both power_limit_ratio and exposed_communication")
        if self.gain is not None:
            require_positive("hardware.gain", self.gain)
        if self.power_limit_ratio is not None:
            require_positive("hardware.power_limit_ratio", self.power_limit_ratio)
        if self.exposed_communication is not None:
            require_fraction("hardware.exposed_communication", self.exposed_communication)

    @property
    def value(self) -> float:
        """The gain."""
        if self.gain is not None:
            return self.gain
        assert self.power_limit_ratio is not None
        assert self.exposed_communication is not None
        return float(
            hardware_gain(power_limit_ratio=self.power_limit_ratio, exposed_communication=self.exposed_communication)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Gain of wider tensor parallelism (Eq. 9-10)."""

    alpha: float
    baseline_tensor_parallel: int

    def __post_init__(self) -> None:
        require_not_negative("model.alpha", self.alpha)
        require_positive("model.baseline_tensor_parallel", self.baseline_tensor_parallel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """One way to keep spares: the block size, idle GPUs in each block, idle blocks in each zone (best if None)."""

    block_gpus: int
    spare_gpus: int = 0
    spare_blocks: int | None = None

    def __post_init__(self) -> None:
        require_positive("strategy.block_gpus", self.block_gpus)
        require_not_negative("strategy.spare_gpus", self.spare_gpus)
        if self.spare_gpus >= self.block_gpus:
            raise BadInputError(
                f"strategy.spare_gpus = {self.spare_gpus}: must be fewer than block_gpus = {self.block_gpus}"
            )
        if self.spare_blocks is not None:
            require_not_negative("strategy.spare_blocks", self.spare_blocks)

    @property
    def working_gpus(self) -> int:
        """GPUs of a block that train."""
        return self.block_gpus - self.spare_gpus

    @property
    def label(self) -> str:
        """`block/working`, such as 72/64."""
        return f"{self.block_gpus}/{self.working_gpus}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SparingCase:
    """The whole question. Sections that are None bring no gain and no constraint."""

    cluster: Cluster
    failures: Failures
    recovery: RecoveryScheme
    strategies: tuple[Strategy, ...]
    placement: Placement | None = None
    hardware: Hardware | None = None
    model: Model | None = None

    def __post_init__(self) -> None:
        if not self.strategies:
            raise BadInputError("strategy: at least one [[strategy]] is needed")
        check_loss_limit(self.recovery, self.cluster.zones)
        for index, strategy in enumerate(self.strategies):
            check_strategy(self.cluster, self.placement, strategy, f"strategy[{index}]")

    @property
    def is_synchronous(self) -> bool:
        """Whether the paper's own scheme applies."""
        return isinstance(self.recovery, Synchronous)


def blocks_per_zone(cluster: Cluster, strategy: Strategy) -> int:
    """Return L."""
    return cluster.racks_per_zone * (cluster.gpus_per_rack // strategy.block_gpus)


def group_blocks(placement: Placement | None, strategy: Strategy) -> int:
    """Return P, the blocks that hold one placement group; 1 without placement."""
    return 1 if placement is None else placement.group_gpus // strategy.working_gpus


def check_strategy(cluster: Cluster, placement: Placement | None, strategy: Strategy, key: str) -> None:
    """Raise `BadInputError` unless the strategy's blocks fit racks, trays, zones and placement groups."""
    if cluster.gpus_per_rack % strategy.block_gpus:
        raise BadInputError(
            f"{key}.block_gpus = {strategy.block_gpus}: must divide cluster.gpus_per_rack = {cluster.gpus_per_rack}"
        )
    for name, gpus in (("block_gpus", strategy.block_gpus), ("spare_gpus", strategy.spare_gpus)):
        if gpus % cluster.gpus_per_tray:
            raise BadInputError(
                f"{key}.{name} = {gpus}: must be a multiple of cluster.gpus_per_tray = {cluster.gpus_per_tray}"
            )
    blocks = blocks_per_zone(cluster, strategy)
    if placement is not None and placement.group_gpus % strategy.working_gpus:
        raise BadInputError(
            f"placement.group_gpus = {placement.group_gpus}: must be a multiple of the {strategy.working_gpus} "
            f"working GPUs of a block of {key}"
        )
    group = group_blocks(placement, strategy)
    if group > blocks:
        raise BadInputError(
            f"placement.group_gpus = {group * strategy.working_gpus}: needs {group} blocks of {key}, "
            f"but a zone has only {blocks}"
        )
    _check_spare_blocks(strategy.spare_blocks, blocks, group, key)


def _check_spare_blocks(spare_blocks: int | None, blocks: int, group: int, key: str) -> None:
    if spare_blocks is None:
        return
    if spare_blocks >= blocks:
        raise BadInputError(f"{key}.spare_blocks = {spare_blocks}: must be fewer than the {blocks} blocks of a zone")
    if (blocks - spare_blocks) % group:
        raise BadInputError(
            f"{key}.spare_blocks = {spare_blocks}: leaves {blocks - spare_blocks} working blocks per zone, which must "
            f"be a multiple of the {group} that placement.group_gpus keeps together"
        )


def scaled_failures(failures: Failures, mtbf_tray_hours: Floats, mttr_hours: Floats) -> Failures:
    """Return the same failures at another tray MTBF and MTTR, the rack MTBF scaled along with the tray's."""
    ratio = as_floats(failures.mtbf_rack_hours) / as_floats(failures.mtbf_tray_hours)
    return Failures(
        mtbf_tray_hours=mtbf_tray_hours,
        mtbf_rack_hours=as_floats(mtbf_tray_hours) * ratio,
        mttr_hours=mttr_hours,
        repair_chain=failures.repair_chain,
        rack_failures=failures.rack_failures,
    )
