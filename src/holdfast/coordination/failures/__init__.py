"""Failure classes, and which node is to blame for a failure.

- `seen.py` constructs each `Failure`, one function for each way to detect one, such as `node_lost` and `process_ended`.
- `Classes.of` finds its class: the first rule that matches, of the site's file and then of `TABLE` (`class_table.py`).
- `Ladder` escalates: retry with the same members, restart the process, remove the node. Each step has a `Budget`.
- `Suspects.name` finds the node to blame if a collective or a state transfer failed and every member answers.
- `find_mismatch` finds workers whose settings or state differ from those of their peers.
- `nodes_that_agree` tells whether the work itself is at fault, because several nodes met the same exception.

`Failures` in `recovery` calls these; docs/failures.md describes them for users.
"""
