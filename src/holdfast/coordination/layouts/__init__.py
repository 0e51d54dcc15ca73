"""Changes the layout of a job when its number of nodes changes (docs/layouts.md).

1. `choose_layout` selects the layout for a number of nodes, by the script or by measured step times.
2. `LayoutChanges.start_if_due` stops the members if a change pays. In the next generation they stash their state in
   node memory.
3. `LayoutChanges.check_stash` checks that every node has the whole state. Then the record names the new layout, all
   workers are replaced, and they load the stashed state.

`FailingLayouts` reverts a change if the script fails under the new layout before its first step.
"""
