"""Tests of failure classes: real messages, the order of rules, and invalid rules."""

from __future__ import annotations

import pytest

from holdfast.coordination.failures.class_table import TABLE
from holdfast.coordination.failures.classes import UNKNOWN, FailureClass, FailureClasses, find_rule_errors
from holdfast.patterns import choose_searched_length
from holdfast.protocol.failures import Detector, FailureKind, FailureRule, Severity

NODE, PROCESS, RETRY = Severity.NODE, Severity.PROCESS, Severity.RETRY

#: real messages of torch, CUDA, NCCL, gloo, the NVIDIA driver and Linux, from public issue threads, logs and
#: documentation (pytorch, nccl, vllm and gloo among them; NVIDIA's pages on Xid errors and page retirement)
RAISED = [
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "ecc_error", NODE),
    ("CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered", "ecc_error", NODE),
    ("XID 48 An uncorrectable double bit error (DBE) has been detected on GPU", "ecc_error", NODE),
    ("NVRM: Xid (PCI:0000:3b:00): 94, pid=7194, Contained: SM (0x1)", "ecc_error", PROCESS),
    ("NVRM: Xid (PCI:0000:3b:00): 95, pid=7194, Uncontained: LTC TAG (0x2,0x0)", "ecc_error", NODE),
    ("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution", "nvlink_error", NODE),
    ("NVRM: Xid (PCI:0000:86:00): 74, pid=0, NVLink: fatal error detected on link 6", "nvlink_error", NODE),
    ("NVRM: Xid (PCI:0000:65:00): 79, pid=1896, GPU has fallen off the bus.", "gpu_lost", NODE),
    ("NVRM: GPU at 0000:01:00.0 has fallen off the bus.", "gpu_lost", NODE),
    ("NVRM: Xid (PCI:0000:1a:00): 119, pid=2101, Timeout waiting for RPC from GSP!", "gpu_driver_error", NODE),
    ("NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120, intr 10000000", "illegal_memory_access", PROCESS),
    ("NVRM: Xid (0000:01:00): 13, 0005 00000000 0000502d 00000104", "xid", PROCESS),
    ("Failed to initialize NVML: Driver/library version mismatch", "gpu_driver_error", NODE),
    ("RuntimeError: No CUDA-capable device is detected", "gpu_driver_error", NODE),
    ("RuntimeError: Error 802: system not yet initialized", "gpu_driver_error", NODE),
    ("DMAR: [DMA Read] Request device [3b:00.0] fault addr 9e4ef2373000", "invalid_dma_mapping", NODE),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", "illegal_memory_access", PROCESS),
    ("RuntimeError: CUDA error: device-side assert triggered", "cuda_error", PROCESS),
    ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "cuda_error", PROCESS),
    ("RuntimeError: CUDA error: unspecified launch failure", "cuda_error", PROCESS),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "cuda_error", PROCESS),
    (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "gpu_out_of_memory",
        2,
    ),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "gpu_out_of_memory", PROCESS),
    ("RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "cuda_error", PROCESS),
    ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library.", "nccl_error", PROCESS),
    ("MemoryError: Unable to allocate 7.45 GiB for an array (train.py, line 9)", "out_of_memory", PROCESS),
    (
        "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
        "out_of_memory",
        PROCESS,
    ),
    ("OSError: [Errno 28] No space left on device: '/ckpt/x'", "disk_full", PROCESS),
    ("OSError: [Errno 5] Input/output error: '/data/7'", "disk_error", PROCESS),
    ("OSError: [Errno 30] Read-only file system: '/data'", "disk_error", PROCESS),
    ("OSError: [Errno 116] Stale file handle", "disk_error", PROCESS),
    ("ValueError: bad sample (train.py, line 30)", "software_error", PROCESS),
    ("torch._dynamo.exc.InternalTorchDynamoError: x", "software_error", PROCESS),
]
COLLECTIVES = [
    ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST) ran", "collective_timeout"),
    ("Timed out waiting 1800000ms for recv operation to complete", "collective_timeout"),
    ("Application timeout caused pair closure", "collective_timeout"),
    ("NET/IB : mlx5_0:1 Got async event : port error", "link_flapping"),
    ("NET/IB : Got completion from peer 10.42.0.2<47534> with status=12 opcode=0", "link_flapping"),
    ("socketPollConnect: connect returned Connection refused, exceeded error retry count (35)", "connection_refused"),
    ("[../gloo/transport/tcp/pair.cc:589] Read error [10.0.0.7]:25266: Connection reset by peer", "connection_reset"),
    ("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:10895", "connection_reset"),
    ("ncclRemoteError: A call failed possibly due to a network error", "connection_reset"),
    ("connect: No route to host", "network_error"),
    ("the group of generation 3 could not be built", "network_error"),
]
ENDED = [
    ("SIGKILL", "signal_kill"),
    ("SIGSEGV", "signal_segv"),
    ("exit code 9", "exit_9"),
    ("the script called sys.exit(3) (train.py, line 2)", "exit_3"),
    ("SIGKILL: out of memory (oom_kill)", "out_of_memory"),
    ("its exit code is not known: the zygote was lost", "exited_abnormally"),
]


@pytest.mark.parametrize(("detail", "status", "severity"), RAISED)
def test_real_exception_messages_are_classified(detail: str, status: str, severity: Severity) -> None:
    assert FailureClasses().classify(FailureKind.EXCEPTION, Detector.EXCEPTION, detail) == FailureClass(
        status, severity
    )


@pytest.mark.parametrize(("detail", "status"), COLLECTIVES)
def test_real_collective_errors_are_classified_as_retries(detail: str, status: str) -> None:
    """A failure that may be transient removes no node on its own."""
    for detector in (Detector.EXCEPTION, Detector.TIMEOUT):
        assert FailureClasses().classify(FailureKind.CONNECTION_LOST, detector, detail) == FailureClass(status, RETRY)


@pytest.mark.parametrize(("detail", "status"), ENDED)
def test_process_exits_are_classified(detail: str, status: str) -> None:
    assert FailureClasses().classify(FailureKind.PROCESS_EXIT, Detector.PROCESS, detail) == FailureClass(
        status, PROCESS
    )


def test_a_lost_connection_or_lease_is_a_node_failure() -> None:
    for kind in (FailureKind.CONNECTION_LOST, FailureKind.LEASE_EXPIRED):
        assert FailureClasses().classify(kind, Detector.NODE_HEALTH, "") == FailureClass("lost_connection", NODE)


def test_a_hang_is_a_process_failure() -> None:
    assert FailureClasses().classify(FailureKind.HANG, Detector.TIMEOUT, "no report") == FailureClass(
        "task_hang", PROCESS
    )


def test_an_unknown_message_is_classified_as_unknown() -> None:
    found = FailureClasses().classify(FailureKind.EXCEPTION, Detector.EXCEPTION, "the daemon sulks")
    assert found == FailureClass(UNKNOWN, PROCESS)


def rule(pattern: str, status: str = "own", severity: Severity = NODE, detector: Detector | None = None) -> FailureRule:
    return FailureRule(pattern=pattern, status=status, severity=severity, detector=detector)


def test_site_rules_precede_the_table_and_the_first_match_applies() -> None:
    classes = FailureClasses([rule("ECC", "bad_ram", RETRY), rule("error", "any", PROCESS)])
    assert classes.classify(FailureKind.EXCEPTION, Detector.EXCEPTION, "an ecc error") == FailureClass("bad_ram", RETRY)
    assert classes.classify(FailureKind.EXCEPTION, Detector.EXCEPTION, "an ERROR") == FailureClass("any", PROCESS)
    assert classes.classify(FailureKind.HANG, Detector.TIMEOUT, "").status == "task_hang"


def test_a_rule_can_be_limited_to_a_detector_and_use_a_group_in_its_status() -> None:
    classes = FailureClasses([rule(r"fan (\d+)", r"fan_\1", NODE, Detector.PROCESS)])
    assert classes.classify(FailureKind.PROCESS_EXIT, Detector.PROCESS, "fan 12 stands").status == "fan_12"
    assert classes.classify(FailureKind.EXCEPTION, Detector.EXCEPTION, "fan 12 stands").status == UNKNOWN


@pytest.mark.parametrize(
    ("patterns", "number", "why"),
    [
        (["fan", "fan"], 1, "it can never match: rule 1, 'fan', matches first"),
        (["fan", "disk", "FAN .* failed"], 2, "it can never match: rule 1, 'fan'"),
        ([".*", "anything"], 1, "it can never match"),
        (["fan|disk", "old fan|hard disk"], 1, "it can never match"),
        ([r"v1\.0", r"driver v1\.0+"], 1, "it can never match"),
        (["fan", "^hang$"], 1, "it can never match: the searched texts begin with one of connection_lost: , "),
        ([r"fan (\w+\s*)+:"], 0, "is refused: it repeats a part that itself has repeats or alternatives: "),
        (["fan("], 0, "the pattern 'fan(' is not a regular expression: missing ), unterminated subpattern"),
    ],
)
def test_invalid_rules_are_reported_with_a_reason(patterns: list[str], number: int, why: str) -> None:
    ((found, said),) = find_rule_errors([rule(pattern) for pattern in patterns])
    assert found == number
    assert why in said


@pytest.mark.parametrize(
    "patterns",
    [
        ["fan .* failed", "fan"],
        [r"\bfan\b", "fans"],
        ["fan|disk", "old fan|mouse"],
        ["fan", "fan?"],
        ["ab", "a{2}b"],
        ["ab", "[ab]+"],
        ["d", r"\d"],
        ["a", "(a|b)"],
        ["fan$", "fan"],
    ],
)
def test_rules_that_may_match_are_accepted(patterns: list[str]) -> None:
    assert list(find_rule_errors([rule(pattern) for pattern in patterns])) == []


def test_a_slow_pattern_is_searched_in_less_of_a_long_message() -> None:
    classes = FailureClasses([rule("fan .*a.*b.*c")])
    assert classes.classify(FailureKind.HANG, Detector.STATISTICS, f"fan {'ab' * 10}c").status == "own"
    assert classes.classify(FailureKind.HANG, Detector.STATISTICS, f"fan {'ab' * 500}c").status == "task_hang"


def test_built_in_rules_are_searched_in_the_whole_message() -> None:
    assert {choose_searched_length(one.pattern, 8192) for one in TABLE} == {8192}
    assert list(find_rule_errors(TABLE)) == []


def test_a_rule_for_one_detector_does_not_shadow_a_general_rule() -> None:
    assert not list(find_rule_errors([rule("fan", detector=Detector.PROCESS), rule("fan")]))
    assert list(find_rule_errors([rule("fan"), rule("fan", detector=Detector.PROCESS)]))


def test_a_status_that_names_a_missing_group_is_refused() -> None:
    ((_, why),) = find_rule_errors([rule("fan", r"fan_\1")])
    assert why == r"the status 'fan_\\1' names a group that the pattern does not have"
    with pytest.raises(ValueError, match="names a group"):
        FailureClasses([rule("fan", r"fan_\1")])
