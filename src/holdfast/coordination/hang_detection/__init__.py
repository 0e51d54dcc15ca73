"""Hang detection, and nodes that are slower than others.

1. On each node, `LateWatch` reads the activity of the workers, learns usual durations, and reports a worker that
   exceeds its limit (`Late`), or the workers' own times (`OwnTimes`).
2. The coordinator's `HangProbe` asks all nodes for the activity of their workers (`Probe`), and collects the answers.
3. `judge_standstill` names the workers that hold up the others, from this evidence alone.
4. `SlowWork` distinguishes slow work from a hang: a worker is cleared if another one needs as long for the same work.
5. The agent ends the worker that hangs. `StackDumps` collects stack dumps and emits `stacks_taken`.

`SlowNodes` finds slow nodes by a sequential test, and `StragglerPolicy` reacts as `--stragglers` says.
"""
