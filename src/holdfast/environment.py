"""Every environment variable that holdfast reads or sets, in one table."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors import BadInputError

ADDRESS = "HOLDFAST_ADDRESS"
TOKEN = "HOLDFAST_TOKEN"
TOKEN_FILE = "HOLDFAST_TOKEN_FILE"
TLS_CA = "HOLDFAST_TLS_CA"
JOB = "HOLDFAST_JOB"
LOG = "HOLDFAST_LOG"
#: for users; the command line and `init()` read them, and an option says more than they do
PUBLIC = {
    ADDRESS: "the coordinator's URL, as --address",
    TOKEN: "the job's secret, which agents and commands show",
    TOKEN_FILE: "a file that holds the secret, as --token-file",
    TLS_CA: "certificates to trust, as --tls-ca",
    JOB: "which of this machine's jobs is meant, as --job",
    LOG: "how much is logged: debug, info, warning or error",
}

LOG_LEVELS = ("debug", "info", "warning", "error")

#: Settings of a worker, as JSON, from its agent. If it is set, the script runs under an agent.
WORKER = "HOLDFAST_WORKER"

#: Number of a loader worker, from its worker. If it is set, the script must not train.
LOADER = "HOLDFAST_LOADER"

#: what no worker gets: secrets, and the places that other launchers have given to the process that starts it
_NOT_FOR_WORKERS = {TOKEN, TOKEN_FILE, WORKER, LOADER, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}

_WORKER_DEFAULTS = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def for_workers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of workers: the environment of the job without secrets, with defaults for missing values.

    As with torchrun, a worker has one thread. NCCL's watchdog must not end a worker after its communicator is aborted.
    """
    kept = {name: value for name, value in environment.items() if name not in _NOT_FOR_WORKERS}
    return {**_WORKER_DEFAULTS, **kept}


def log_level(environment: Mapping[str, str], default: str = "") -> str:
    """Return the log level that the user's environment variable names, or else `default` ("": unchanged).

    Raises:
        BadInputError: the variable has a value that is not a level.
    """
    level = environment.get(LOG) or default
    if level and level not in LOG_LEVELS:
        raise BadInputError(f"{LOG} is {level!r}: it must be one of {', '.join(LOG_LEVELS)}")
    return level
