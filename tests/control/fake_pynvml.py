"""A fake of the module `pynvml` with two GPUs: a new one that reports everything, and an old one.

In-process tests use its functions directly. For an agent process, put a copy named pynvml.py into a folder on its path.
"""

from __future__ import annotations

from dataclasses import dataclass

NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_TEMPERATURE_GPU = 0
nvmlEventTypeXidCriticalError = 8


class NVMLError(Exception):
    """The driver refused a request."""


class NVMLError_NotSupported(NVMLError):
    """The GPU does not support this query."""


@dataclass
class Memory:
    """Memory use in bytes."""

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
#: GPUs that share the machine's memory, as a GB10 does.
SHARED_MEMORY: set[int] = set()


def _check_present(device: int) -> None:
    if device in LOST:
        raise NVMLError("GPU is lost")


def nvmlInit() -> None:
    """Open the driver's library."""


def nvmlDeviceGetCount() -> int:
    """Return the number of GPUs, which is two."""
    return 2


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    """Return a handle, which differs from the index."""
    _check_present(100 + index)
    return 100 + index


def nvmlDeviceGetIndex(device: int) -> int:
    """Return the index of a handle."""
    _check_present(device)
    return device - 100


def nvmlDeviceGetName(device: int) -> str:
    """Return the name of the GPU."""
    return f"Fake GPU {device}"


def nvmlDeviceGetMemoryInfo(device: int) -> Memory:
    """Return the used and total memory."""
    _check_present(device)
    if device in SHARED_MEMORY:
        raise NVMLError_NotSupported("Not Supported")
    return Memory(used=3_000_000_000, total=80_000_000_000)


def _only_the_first(device: int) -> None:
    if device != 100:
        raise NVMLError_NotSupported("Not Supported")


def nvmlDeviceGetTemperature(device: int, sensor: int) -> int:
    """Return the temperature in degrees Celsius."""
    assert sensor == NVML_TEMPERATURE_GPU
    return 40 + device - 100


def nvmlDeviceGetCurrentClocksThrottleReasons(device: int) -> int:
    """Return the flags "idle" and "thermal slowdown"."""
    _only_the_first(device)
    return 0x01 | 0x40


def nvmlDeviceGetTotalEccErrors(device: int, kind: int, counter: int) -> int:
    """Return two errors."""
    _only_the_first(device)
    assert (kind, counter) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return 2


def nvmlDeviceGetSupportedEventTypes(device: int) -> int:
    """Return the supported events; the second GPU supports none."""
    return nvmlEventTypeXidCriticalError if device == 100 else 0


def nvmlEventSetCreate() -> set[int]:
    """Return an event set: the devices that deliver events to it."""
    return set()


def nvmlDeviceRegisterEvents(device: int, types: int, events: set[int]) -> None:
    """Subscribe to a device's events."""
    _only_the_first(device)
    events.add(device)


def nvmlEventSetWait_v2(events: set[int], timeout_ms: int) -> Event:
    """Return the next event of a device in the set."""
    for event in XIDS:
        if event.device in events:
            XIDS.remove(event)
            return event
    raise NVMLError("Timeout")
