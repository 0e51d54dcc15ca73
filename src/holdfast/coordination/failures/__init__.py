"""Classifies failures, and finds the node that caused one.

- `detections.py` constructs each `Failure`, one function for each way to detect one, such as `node_lost` and
  `process_ended`.
- `FailureClasses.classify` finds its class: the first matching rule, of the site's file and then of `TABLE`.
- `EscalationPolicy` escalates: retry with the same members, restart the process, remove the node. Each step has a
  `Budget`.
- `Suspects.find_suspects` finds the node to blame if a collective or a state transfer failed and every member answers.
- `find_mismatch` finds workers with other settings or state than their peers.
- `find_agreeing_nodes` decides whether the work itself is at fault, because several nodes met the same exception.

`Failures` in `recovery` calls these; docs/failures.md describes them for users.
"""
