"""A table of the time that a job spent, by cause."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from holdfast.observability.accounts.time_ledger import TimeAccount


def print_account(account: TimeAccount, console: Console) -> None:
    """Print a job's efficiency (ETTR, goodput, node-hours, FLOP), and a table of its time by cause, largest first.

    Values that are unknown and causes without time are left out.
    """
    goodput = "" if account.goodput is None else f", goodput {account.goodput:.1%} of {account.full_world} workers'"
    console.print(
        f"trained {account.ettr:.1%} of the time (ETTR){goodput}; "
        f"{account.node_hours:.3f} node-hours, {account.accelerator_hours:.3f} accelerator-hours",
        highlight=False,
    )
    if account.flop_delivered is not None:
        mfu = "" if account.mfu is None else f", {account.mfu:.1%} of the peak (MFU)"
        console.print(f"{account.flop_delivered:.3g} FLOP delivered{mfu}", highlight=False)
    spent = sorted(((seconds, cause) for cause, seconds in account.seconds.items() if seconds > 0), reverse=True)
    table = Table("time", "s", "%", box=None)
    for seconds, cause in spent:
        table.add_row(cause.replace("_", "-"), f"{seconds:.2f}", f"{seconds / account.wall_s:.1%}")
    console.print(table)
