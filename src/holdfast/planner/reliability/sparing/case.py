"""The input of a comparison of sparing strategies: the cluster, how it fails, the job, and the strategies.

The field names are the keys of the TOML file that the command line reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.errors import BadInputError
from holdfast.planner.reliability.sparing.block_mtbf import RepairChain
from holdfast.planner.reliability.sparing.gains import hardware_gain, power_limit_ratio
from holdfast.planner.reliability.sparing.recovery import RackFailures, RecoveryScheme, check_loss_limit
from holdfast.planning.special import (
    Floats,
    as_floats,
    require_fraction,
    require_not_negative,
    require_positive,
)

#: Largest number of GPUs. Sums over the blocks then take seconds.
MOST_GPUS = 10_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """B sparing zones of equal racks; a tray is the smallest unit that fails on its own."""

    zones: int
    racks_per_zone: int
    gpus_per_rack: int
    gpus_per_tray: int

    def __post_init__(self) -> None:
        """Raise `BadInputError` if a count is not positive, GPUs are too many, or trays do not divide a rack."""
        for key in ("zones", "racks_per_zone", "gpus_per_rack", "gpus_per_tray"):
            require_positive(f"cluster.{key}", getattr(self, key))
        if self.gpus > MOST_GPUS:
            raise BadInputError(
                f"cluster.zones x racks_per_zone x gpus_per_rack = {self.gpus:.3g}: must be at most {MOST_GPUS:,} GPUs"
            )
        if self.gpus_per_rack % self.gpus_per_tray:
            raise BadInputError(
                f"cluster.gpus_per_tray = {self.gpus_per_tray}: must divide gpus_per_rack = {self.gpus_per_rack}"
            )

    @property
    def gpus(self) -> int:
        """All GPUs, spare ones included."""
        return self.zones * self.racks_per_zone * self.gpus_per_rack


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureModel:
    """How trays and racks fail and return. Hours; arrays broadcast."""

    mtbf_tray_hours: Floats
    mtbf_rack_hours: Floats
    mttr_hours: Floats
    repair_chain: RepairChain = RepairChain.TOGETHER
    rack_failures: RackFailures = RackFailures.PER_BLOCK

    def __post_init__(self) -> None:
        """Raise `BadInputError` unless all mean times are positive."""
        for key in ("mtbf_tray_hours", "mtbf_rack_hours", "mttr_hours"):
            require_positive(f"failures.{key}", getattr(self, key))


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A constraint: working GPUs that must be in the same sparing zone."""

    group_gpus: int

    def __post_init__(self) -> None:
        require_positive("placement.group_gpus", self.group_gpus)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The gain of a rack with `spare_gpus_per_rack` idle GPUs, from which every strategy's gain follows.

    Give `gain` or `exposed_communication`.
    """

    spare_gpus_per_rack: int
    #: measured: by how much the power limit of the working GPUs can rise
    power_limit_ratio: float
    #: measured: by how much faster they then train
    gain: float | None = None
    #: measured: share of time in which communication is exposed, which more power does not shorten
    exposed_communication: float | None = None

    def __post_init__(self) -> None:
        """Raise `BadInputError` for values out of range, or if not exactly one of gain and exposure is given."""
        require_positive("hardware.spare_gpus_per_rack", self.spare_gpus_per_rack)
        if not self.power_limit_ratio > 1.0:
            raise BadInputError(f"hardware.power_limit_ratio = {self.power_limit_ratio:g}: must be greater than 1")
        if (self.gain is None) == (self.exposed_communication is None):
            raise BadInputError("hardware: give either gain or exposed_communication")
        if self.exposed_communication is not None:
            require_fraction("hardware.exposed_communication", self.exposed_communication)
        most = math.sqrt(self.power_limit_ratio)
        if self.gain is not None and not 1.0 <= self.gain <= most:
            raise BadInputError(
                f"hardware.gain = {self.gain:g}: must lie between 1 and {most:.6g}, the root of power_limit_ratio"
            )

    def gain_of(self, strategy: SparingStrategy, gpus_per_rack: int) -> float:
        """Return a strategy's gain, by Eq. 8, at the power that its idle GPUs set free.

        Each idle GPU sets free as much power as measured.
        """
        measured = self.spare_gpus_per_rack / (gpus_per_rack - self.spare_gpus_per_rack)
        ratio = power_limit_ratio(
            idle_per_working=strategy.spare_gpus / strategy.working_gpus,
            idle_frees=(self.power_limit_ratio - 1.0) / measured,
        )
        return float(hardware_gain(power_limit_ratio=ratio, exposed_communication=self._exposed))

    @property
    def _exposed(self) -> float:
        """Share of exposed communication: as given, or else computed from `gain` and the power limit ratio."""
        if self.gain is None:
            assert self.exposed_communication is not None
            return self.exposed_communication
        return 1.0 - (self.gain - 1.0) / (math.sqrt(self.power_limit_ratio) - 1.0)


def check_hardware(hardware: Hardware, gpus_per_rack: int) -> None:
    """Check the measured rack.

    Raises:
        BadInputError: the rack has too few GPUs, or its idle GPUs set free more power than they draw.
    """
    spare = hardware.spare_gpus_per_rack
    if spare >= gpus_per_rack:
        raise BadInputError(
            f"hardware.spare_gpus_per_rack = {spare}: must be fewer than cluster.gpus_per_rack = {gpus_per_rack}"
        )
    most = gpus_per_rack / (gpus_per_rack - spare)
    if hardware.power_limit_ratio > most:
        raise BadInputError(
            f"hardware.power_limit_ratio = {hardware.power_limit_ratio:g}: must be at most {most:.6g}, all the "
            f"power of {spare} of {gpus_per_rack} GPUs shared by the others"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Gain of wider tensor parallelism (Eq. 9-10)."""

    alpha: float
    baseline_tensor_parallel: int

    def __post_init__(self) -> None:
        """Raise `BadInputError` for a negative alpha, or a baseline that is not positive."""
        require_not_negative("model.alpha", self.alpha)
        require_positive("model.baseline_tensor_parallel", self.baseline_tensor_parallel)


@dataclass(frozen=True, kw_only=True, slots=True)
class SparingStrategy:
    """One way to keep spares."""

    #: GPUs of a block
    block_gpus: int
    #: idle GPUs in each block
    spare_gpus: int = 0
    #: idle blocks in each zone, or None for the best number
    spare_blocks: int | None = None
    #: measured for this strategy, or None to derive it from `Hardware`
    hardware_gain: float | None = None

    def __post_init__(self) -> None:
        """Raise `BadInputError` for negative counts, no GPU left to work, or a gain above that of all GPUs working."""
        require_positive("strategy.block_gpus", self.block_gpus)
        require_not_negative("strategy.spare_gpus", self.spare_gpus)
        if self.spare_gpus >= self.block_gpus:
            raise BadInputError(
                f"strategy.spare_gpus = {self.spare_gpus}: must be fewer than block_gpus = {self.block_gpus}"
            )
        if self.spare_blocks is not None:
            require_not_negative("strategy.spare_blocks", self.spare_blocks)
        if self.hardware_gain is not None:
            require_positive("strategy.hardware_gain", self.hardware_gain)
            most = self.block_gpus / self.working_gpus
            if self.hardware_gain > most:
                raise BadInputError(
                    f"strategy.hardware_gain = {self.hardware_gain:g}: must be at most {most:.6g}, the gain of a "
                    "block if its idle GPUs worked; it is a factor, 1.034 for 3.4 % more"
                )

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
    """The complete input. Sections that are None have no gain and no constraint."""

    cluster: Cluster
    failures: FailureModel
    recovery: RecoveryScheme
    strategies: tuple[SparingStrategy, ...]
    placement: Placement | None = None
    hardware: Hardware | None = None
    model: Model | None = None

    def __post_init__(self) -> None:
        """Raise `BadInputError` if there is no strategy, one occurs twice, or parts of the case do not fit."""
        if not self.strategies:
            raise BadInputError("strategy: at least one [[strategy]] is needed")
        check_loss_limit(self.recovery, self.cluster.zones)
        if self.hardware is not None:
            check_hardware(self.hardware, self.cluster.gpus_per_rack)
        for index, strategy in enumerate(self.strategies):
            first = self.strategies.index(strategy)
            if first != index:
                raise BadInputError(f"strategy[{index}] = {strategy.label}: is strategy[{first}] again: remove one")
            check_strategy(self.cluster, self.placement, strategy, f"strategy[{index}]")


def blocks_per_zone(cluster: Cluster, strategy: SparingStrategy) -> int:
    """Return L, the number of blocks in a zone."""
    return cluster.racks_per_zone * (cluster.gpus_per_rack // strategy.block_gpus)


def group_blocks(placement: Placement | None, strategy: SparingStrategy) -> int:
    """Return P, the number of blocks that hold one placement group, or 1 without placement."""
    return 1 if placement is None else -(-placement.group_gpus // strategy.working_gpus)


def placed_share(placement: Placement | None, strategy: SparingStrategy) -> float:
    """Return the share of the blocks' working GPUs that a placement group uses. The others are stranded.

    The share is 1 without a placement constraint.
    """
    if placement is None:
        return 1.0
    return placement.group_gpus / (group_blocks(placement, strategy) * strategy.working_gpus)


def check_strategy(cluster: Cluster, placement: Placement | None, strategy: SparingStrategy, key: str) -> None:
    """Raise `BadInputError` unless the strategy's blocks fit racks, trays, zones and placement groups.

    If it gives a number of spare blocks, the others must form whole groups. `key` names the strategy in the message.
    """
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
    group = group_blocks(placement, strategy)
    if placement is not None and group > blocks:
        raise BadInputError(
            f"placement.group_gpus = {placement.group_gpus}: needs {group} blocks of {key}, "
            f"but a zone has only {blocks}"
        )
    _check_spare_blocks(strategy.spare_blocks, blocks, group, key)


def _check_spare_blocks(spare_blocks: int | None, blocks: int, group: int, key: str) -> None:
    """Raise `BadInputError` if no block of a zone is left, or the others do not form whole groups. None is valid.

    `blocks` is the number of blocks of a zone, `group` of a group, and `key` names the strategy in the message.
    """
    if spare_blocks is None:
        return
    if spare_blocks >= blocks:
        raise BadInputError(f"{key}.spare_blocks = {spare_blocks}: must be fewer than the {blocks} blocks of a zone")
    if (blocks - spare_blocks) % group:
        raise BadInputError(
            f"{key}.spare_blocks = {spare_blocks}: leaves {blocks - spare_blocks} working blocks per zone, which must "
            f"be a multiple of the {group} that placement.group_gpus keeps together"
        )


def scaled_failures(failures: FailureModel, mtbf_tray_hours: Floats, mttr_hours: Floats) -> FailureModel:
    """Return the failures with another tray MTBF and MTTR. The rack MTBF keeps its ratio to the tray MTBF."""
    ratio = as_floats(failures.mtbf_rack_hours) / as_floats(failures.mtbf_tray_hours)
    return FailureModel(
        mtbf_tray_hours=mtbf_tray_hours,
        mtbf_rack_hours=as_floats(mtbf_tray_hours) * ratio,
        mttr_hours=mttr_hours,
        repair_chain=failures.repair_chain,
        rack_failures=failures.rack_failures,
    )
