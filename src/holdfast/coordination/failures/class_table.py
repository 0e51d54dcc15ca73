r"""The table of failures: patterns with their class and severity (Unicron, Table 1, in more detail).

The first matching rule counts. The text to match is `KIND: DETAIL`: `exception: RuntimeError: CUDA error: ...`,
`process_exit: SIGKILL`, `connection_lost: ...`. Rules that remove a node come first, so that a hardware error is not
mistaken for an error of the software that met it. The others go from special to general. Rules of a site come before
all of these (docs/failures.md).
"""

from __future__ import annotations

from holdfast.protocol.failures import Detector, FailureRule, Severity

#: Classes that indicate a problem of the machine, whatever their severity. Rules that remove a node do so, too.
MACHINE_CLASSES = frozenset(("ecc_error", "nvlink_error", "gpu_lost", "gpu_driver_error", "xid", "disk_error"))

#: class of a worker with other settings or state than the other workers of its role
REPLICA_DIFFERS = "replica_differs"

_NODE, _PROCESS, _RETRY = Severity.NODE, Severity.PROCESS, Severity.RETRY


def _rule(status: str, severity: Severity, pattern: str, detector: Detector | None = None) -> FailureRule:
    return FailureRule(pattern=pattern, status=status, severity=severity, detector=detector)


#: `Xid (PCI:0000:65:00): 79, pid=...`
_XID = r"\bxid\b[^:,]*(?:\([^)]*\))?[^0-9]{0,4}\b"

TABLE: tuple[FailureRule, ...] = (
    _rule("lost_connection", _NODE, r"^(?:connection_lost|lease_expired):", Detector.NODE_HEALTH),
    # ---- the machine ----
    _rule("ecc_error", _NODE, _XID + r"(?:48|64|92|95|140)\b"),
    _rule("nvlink_error", _NODE, _XID + r"74\b|\bsxid\b"),
    _rule("gpu_lost", _NODE, _XID + r"79\b|fallen off the bus|\bGPU is lost\b"),
    _rule("gpu_driver_error", _NODE, _XID + r"(?:46|61|62|109|119|120)\b"),
    _rule("illegal_memory_access", _PROCESS, _XID + r"31\b"),
    _rule("ecc_error", _PROCESS, _XID + r"94\b"),  # contained: only the process that met it ends
    _rule("xid", _PROCESS, _XID + r"\d+"),
    _rule("ecc_error", _NODE, r"uncorrectable ECC|ECC_UNCORRECTABLE|ECCUncorrectable|double[- ]bit ECC"),
    _rule("nvlink_error", _NODE, r"uncorrectable NVLink|NVLINK_UNCORRECTABLE|NvlinkUncorrectable"),
    _rule("invalid_dma_mapping", _NODE, r"invalid DMA mapping|DMA mapping (?:error|failed)|DMAR:.*fault|IO_PAGE_FAULT"),
    _rule("gpu_driver_error", _NODE, r"driver/library version mismatch|CUDA driver version is insufficient"),
    _rule("gpu_driver_error", _NODE, r"no CUDA-capable device|failed to initialize NVML|system not yet initialized"),
    # ---- the network ----
    _rule("collective_timeout", _RETRY, r"collective operation timeout|NCCL.*time(?:d[ -]?)?out"),
    _rule("collective_timeout", _RETRY, r"timed out waiting \d+ ?ms|application timeout caused pair closure"),
    _rule("link_flapping", _RETRY, r"link (?:is )?(?:down|flap)|got async event ?: port|NET/IB ?: got completion"),
    _rule("connection_refused", _RETRY, r"connection refused|ECONNREFUSED"),
    _rule("connection_reset", _RETRY, r"connection (?:was )?reset|ECONNRESET|broken pipe"),
    _rule("connection_reset", _RETRY, r"connection (?:was )?closed by (?:remote )?peer|ncclRemoteError"),
    _rule("network_error", _RETRY, r"no route to host|network is (?:unreachable|down)|connection timed out"),
    _rule("network_error", _RETRY, r"name or service not known|temporary failure in name resolution|ncclSystemError"),
    # ---- a new process may help ----
    _rule("gpu_out_of_memory", _PROCESS, r"(?:CUDA|HIP) out of memory|CUDA error: out of memory|STATUS_ALLOC_FAILED"),
    _rule("illegal_memory_access", _PROCESS, r"illegal memory access|misaligned address|ErrorIllegalAddress"),
    _rule("cuda_error", _PROCESS, r"CUDA (?:driver )?error|unhandled cuda error|device-side assert"),
    _rule("cuda_error", _PROCESS, r"CUDA_ERROR_|CU(?:BLAS|DNN|SOLVER|SPARSE|FFT)_STATUS_|unspecified launch failure"),
    _rule("nccl_error", _PROCESS, r"\bnccl"),
    _rule("out_of_memory", _PROCESS, r"^process_exit: .*out of memory|^exception: MemoryError|std::bad_alloc"),
    _rule("out_of_memory", _PROCESS, r"(?:can't|cannot) allocate memory|out of shared memory"),
    _rule("disk_full", _PROCESS, r"no space left on device|disk quota exceeded"),
    _rule("disk_error", _PROCESS, r"\[Errno 5\]|read-only file system|stale (?:NFS )?file handle|remote I/O error"),
    _rule(r"signal_\1", _PROCESS, r"^process_exit: SIG([A-Z0-9]+)"),
    _rule(r"exit_\1", _PROCESS, r"^process_exit: (?:exit code |.*\bsys\.exit\()(\d+)"),
    _rule("exited_abnormally", _PROCESS, r"^process_exit:"),
    _rule(REPLICA_DIFFERS, _PROCESS, r"^exception: replica differs:"),
    _rule("task_hang", _PROCESS, r"^hang:"),
    _rule("software_error", _PROCESS, r"^exception: [\w.]*(?:Error|Exception|Warning|Interrupt|Exit|Stop)\b"),
    # ---- a collective failed without a known reason ----
    _rule("network_error", _RETRY, r"^connection_lost:"),
)
