"""Reads the state of a node's GPUs from NVIDIA's driver: memory, temperature, throttling, ECC and Xid errors.

This needs the package `nvidia-ml-py` (`pip install holdfast[gpu]`). Without it, or without a driver, nothing is
reported. Reading does not initialize CUDA, and uses no GPU memory.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from holdfast.protocol.messages.gpus import MAX_GPUS, MAX_XIDS, GpuFacts

_log = logging.getLogger("holdfast.agent")

#: seconds between two checks for Xid errors
POLL_S = 1.0
#: The facts are reported after each check that found an Xid error, and after every tenth check.
_POLLS_PER_REPORT = 10
#: The driver's reasons for lowered clocks (`nvmlClocksEventReason...`), by their bit. An idle GPU is not throttled.
_THROTTLE_REASONS = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
_MAX_TEXT = 256

#: the module `pynvml`, which has no types
Nvml = Any


def load_nvml() -> Nvml | None:
    """Import `pynvml` and open the driver's library; return None if one of them is missing or does not work."""
    try:
        nvml: Nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        _log.info("the GPUs' state is not reported: %s", error)
        return None
    return nvml


class GpuReader:
    """Reads the facts of all GPUs that the driver shows to this process.

    Args:
        nvml: The module `pynvml`, initialized.
    """

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._gpus = [_Gpu(nvml, index) for index in range(min(_ask(nvml, "DeviceGetCount") or 0, MAX_GPUS))]

    @property
    def count(self) -> int:
        """The number of GPUs."""
        return len(self._gpus)

    def read(self) -> tuple[GpuFacts, ...]:
        """Return the present facts of each GPU."""
        return tuple(gpu.read() for gpu in self._gpus)

    def collect_xids(self) -> int:
        """Log and keep the Xid errors since the last call; return their number."""
        return sum(gpu.collect_xids() for gpu in self._gpus)


class _Gpu:
    """One GPU, by its number in the driver."""

    def __init__(self, nvml: Nvml, index: int) -> None:
        self._nvml = nvml
        self._index = index
        self._xids = deque[int](maxlen=MAX_XIDS)
        handle = _ask(nvml, "DeviceGetHandleByIndex", index)
        self._name = "" if handle is None else str(_ask(nvml, "DeviceGetName", handle) or "")[:_MAX_TEXT]
        # Each GPU has its own event set: the driver does not tell the index of a GPU that has fallen off the bus.
        self._events = None if handle is None else self._subscribe(handle)

    def _subscribe(self, handle: Any) -> Any:
        """Return an event set for the GPU's Xid errors, or None if the GPU cannot report them."""
        nvml = self._nvml
        wanted = nvml.nvmlEventTypeXidCriticalError
        if not (_ask(nvml, "DeviceGetSupportedEventTypes", handle) or 0) & wanted:
            return None
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, wanted, events)
        except nvml.NVMLError as error:
            _log.info("Xid errors of GPU %d (%s) are not reported: %s", self._index, self._name, error)
            return None
        return events

    def collect_xids(self) -> int:
        """Log and keep the Xid errors since the last call, at most `MAX_XIDS` in one call; return their number."""
        if self._events is None:
            return 0
        for found in range(MAX_XIDS):
            event = _ask(self._nvml, "EventSetWait_v2", self._events, 0)
            if event is None:  # No event within 0 ms.
                return found
            self._xids.append(int(event.eventData))
            _log.warning("GPU %d (%s): Xid error %d", self._index, self._name, event.eventData)
        return MAX_XIDS

    def read(self) -> GpuFacts:
        """Return the GPU's present facts. If it cannot be read, they contain the problem instead of values.

        A value that the GPU does not report is 0 or "".
        """
        nvml, xids = self._nvml, tuple(self._xids)
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(self._index)
            used, total = _read_memory(nvml, handle)
        except nvml.NVMLError as error:
            return GpuFacts(index=self._index, name=self._name, xids=xids, problem=str(error)[:_MAX_TEXT])
        bits = _ask(nvml, "DeviceGetCurrentClocksThrottleReasons", handle) or 0
        uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return GpuFacts(
            index=self._index,
            name=self._name,
            memory_used=used,
            memory_total=total,
            temperature_c=int(_ask(nvml, "DeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU) or 0),
            throttled=", ".join(reason for bit, reason in _THROTTLE_REASONS.items() if bits & bit),
            ecc_errors=int(_ask(nvml, "DeviceGetTotalEccErrors", handle, uncorrected, volatile) or 0),
            xids=xids,
        )


def _read_memory(nvml: Nvml, handle: Any) -> tuple[int, int]:
    """Return the used and the total memory in bytes, or (0, 0) if the GPU shares the memory of the machine.

    Raises:
        NVMLError: The GPU cannot be read.
    """
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:
        return 0, 0
    return int(memory.used), int(memory.total)


def _ask(nvml: Nvml, function: str, *arguments: Any) -> Any:
    """Call the driver's function `nvml<function>`; return None if it fails, as for ECC errors of a GPU without ECC."""
    try:
        return getattr(nvml, f"nvml{function}")(*arguments)
    except nvml.NVMLError:
        return None


def watch_gpus(
    on_read: Callable[[tuple[GpuFacts, ...]], None],
    *,
    load: Callable[[], Nvml | None] = load_nvml,
    poll_s: float = POLL_S,
) -> threading.Event:
    """Start a thread that reports the GPUs' facts, every ten checks and after each check that found an Xid error.

    The thread ends if there is no GPU. If the driver hangs, only these reports stop: nothing waits for the thread, not
    even the end of the process.

    Args:
        on_read: Called in the thread, with the facts of all GPUs.
        load: Returns the driver's library, or None if there is none.
        poll_s: Seconds between two checks.

    Returns:
        An event that ends the thread once it is set. A report that is under way may still come.
    """
    stop = threading.Event()

    def watch() -> None:
        """Check and report until `stop` is set; return at once if there is no driver or GPU."""
        nvml = load()
        reader = None if nvml is None else GpuReader(nvml)
        if reader is None or not reader.count:
            return
        for number in itertools.count():
            if reader.collect_xids() or number % _POLLS_PER_REPORT == 0:
                on_read(reader.read())
            if stop.wait(poll_s):
                return

    threading.Thread(target=watch, name="holdfast-gpus", daemon=True).start()
    return stop
