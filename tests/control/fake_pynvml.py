"""Stands for the module `pynvml`: two GPUs, the first of which says all, the second of which is old and then lost.

In a test, its functions are the module's; in an agent's process, a folder with a copy of it named pynvml.py is on the
path.
"""

from __future__ import annotations

from dataclasses import dataclass

NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_TEMPERATURE_GPU = 0
nvmlEventTypeXidCriticalError = 8


class NVMLError(Exception):
    """The driver refuses a request."""


class NVMLError_NotSupported(NVMLError):
    """The GPU does not know this fact."""


@dataclass
class Memory:
    """Bytes."""

    used: int
    total: int


@dataclass
class Event:
    """An Xid error of a device."""

    device: int
    eventData: int
    eventType: int = nvmlEventTypeXidCriticalError


XIDS = [Event(device=100, eventData=31), Event(device=100, eventData=79)]
LOST: set[int] = set()
#: GPUs whose memory is the machine's, as of a GB10
SHARED_MEMORY: set[int] = set()


def _check_present(device: int) -> None:
    if device in LOST:
        raise NVMLError("GPU is lost")


def nvmlInit() -> None:
    """Open the driver's library."""


def nvmlDeviceGetCount() -> int:
    """Two."""
    return 2


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    """Return a handle, which is not an index."""
    _check_present(100 + index)
    return 100 + index


def nvmlDeviceGetIndex(device: int) -> int:
    """Return the index of a handle."""
    _check_present(device)
    return device - 100


def nvmlDeviceGetName(device: int) -> str:
    """Say which it is."""
    return f"Fake GPU {device}"


def nvmlDeviceGetMemoryInfo(device: int) -> Memory:
    """Return how much is used."""
    _check_present(device)
    if device in SHARED_MEMORY:
        raise NVMLError_NotSupported("Not Supported")
    return Memory(used=3_000_000_000, total=80_000_000_000)


def _only_the_first(device: int) -> None:
    if device != 100:
        raise NVMLError_NotSupported("Not Supported")


def nvmlDeviceGetTemperature(device: int, sensor: int) -> int:
    """Degrees Celsius."""
    assert sensor == NVML_TEMPERATURE_GPU
    return 40 + device - 100


def nvmlDeviceGetCurrentClocksThrottleReasons(device: int) -> int:
    """Idle, and too hot."""
    _only_the_first(device)
    return 0x01 | 0x40


def nvmlDeviceGetTotalEccErrors(device: int, kind: int, counter: int) -> int:
    """Two."""
    _only_the_first(device)
    assert (kind, counter) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return 2


def nvmlDeviceGetSupportedEventTypes(device: int) -> int:
    """The second has none."""
    return nvmlEventTypeXidCriticalError if device == 100 else 0


def nvmlEventSetCreate() -> set[int]:
    """Return an event set: the devices whose events it delivers."""
    return set()


def nvmlDeviceRegisterEvents(device: int, types: int, events: set[int]) -> None:
    """Subscribe to a device's events."""
    _only_the_first(device)
    events.add(device)


def nvmlEventSetWait_v2(events: set[int], timeout_ms: int) -> Event:
    """Return the next event of a device of the set."""
    for event in XIDS:
        if event.device in events:
            XIDS.remove(event)
            return event
    raise NVMLError("Timeout")
