"""Reads what NVIDIA's driver knows of a node's GPUs: memory, temperature, throttling, ECC and Xid errors.

It needs the package `nvidia-ml-py` (`pip install holdfast[gpu]`). Without it, or without a driver, nothing is reported.
Reading does not initialize CUDA, and takes no memory of a GPU.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from holdfast.protocol.messages.gpus import MAX_GPUS, MAX_XIDS, GpuFacts

_log = logging.getLogger("holdfast.agent")

#: seconds between two looks for Xid errors; the facts are reported after each look that found one, and each tenth look
LOOK_S = 1.0
_LOOKS = 10
#: the driver's bits for lowered clocks (`nvmlClocksEventReason...`), by what they say; an idle GPU is not throttled
_THROTTLED = {
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}

#: the module `pynvml`, which has no types
Nvml = Any
Told = Callable[[tuple[GpuFacts, ...]], None]


def load_nvml() -> Nvml | None:
    """Return the module `pynvml` with the driver's library opened; None if one of them is missing or does not work."""
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
        self._xids = defaultdict[int, deque[int]](lambda: deque(maxlen=MAX_XIDS))
        self._handles: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        for index in range(min(self._known(nvml.nvmlDeviceGetCount) or 0, MAX_GPUS)):
            self._handles[index] = self._known(nvml.nvmlDeviceGetHandleByIndex, index)
            self._names[index] = str(self._known(nvml.nvmlDeviceGetName, self._handles[index]) or "")[:256]
        self._events = self._subscribe()

    @property
    def count(self) -> int:
        """How many GPUs there are."""
        return len(self._handles)

    def read(self) -> tuple[GpuFacts, ...]:
        """Return the present facts of each GPU."""
        return tuple(map(self._facts, self._handles))

    def take_xids(self) -> bool:
        """Remember the Xid errors since the last call, and log them; return whether there were any."""
        nvml, found = self._nvml, False
        for _ in range(MAX_XIDS):
            event = None if self._events is None else self._known(nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:
                break
            index = self._known(nvml.nvmlDeviceGetIndex, event.device)
            if index in self._handles:
                self._xids[index].append(int(event.eventData))
                _log.warning("GPU %d (%s): Xid error %d", index, self._names[index], event.eventData)
                found = True
        return found

    def _subscribe(self) -> Any:
        """Ask the driver for Xid errors. None if no GPU can report them."""
        nvml = self._nvml
        events = self._known(nvml.nvmlEventSetCreate)
        wanted = nvml.nvmlEventTypeXidCriticalError
        subscribed = False
        for handle in self._handles.values():
            if events is not None and (self._known(nvml.nvmlDeviceGetSupportedEventTypes, handle) or 0) & wanted:
                try:
                    nvml.nvmlDeviceRegisterEvents(handle, wanted, events)
                    subscribed = True
                except nvml.NVMLError as error:
                    _log.info("a GPU's Xid errors are not reported: %s", error)
        return events if subscribed else None

    def _facts(self, index: int) -> GpuFacts:
        nvml, handle = self._nvml, self._handles[index]
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            problem = str(error)[:256]
            return GpuFacts(index=index, name=self._names[index], xids=tuple(self._xids[index]), problem=problem)
        bits = self._known(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return GpuFacts(
            index=index,
            name=self._names[index],
            memory_used=int(memory.used),
            memory_total=int(memory.total),
            temperature_c=int(self._known(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU) or 0),
            throttled=", ".join(name for bit, name in _THROTTLED.items() if bits & bit),
            ecc_errors=int(self._known(nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, volatile) or 0),
            xids=tuple(self._xids[index]),
        )

    def _known(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return a function's result; None if the driver cannot say: old GPUs have no ECC, a lost GPU says nothing."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


def watch_gpus(tell: Told, *, load: Callable[[], Nvml | None] = load_nvml, look_s: float = LOOK_S) -> threading.Event:
    """Report the GPUs' facts every ten looks, and after each look that found an Xid error, from a thread of its own.

    The thread ends if there is no GPU. A driver that hangs stops only these reports: nothing waits for the thread, not
    even the end of the process.

    Returns:
        An event; once it is set, no more is reported.
    """
    stop = threading.Event()

    def watch() -> None:
        nvml = load()
        reader = None if nvml is None else GpuReader(nvml)
        if reader is None or not reader.count:
            return
        for number in itertools.count():
            if reader.take_xids() or number % _LOOKS == 0:
                tell(reader.read())
            if stop.wait(look_s):
                return

    threading.Thread(target=watch, name="holdfast-gpus", daemon=True).start()
    return stop
