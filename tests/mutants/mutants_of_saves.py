"""The mutants of checkpoints, of what is on disk first, and of lists that members could fill."""

from __future__ import annotations

from mutant import Mutant

CHECKPOINTS = "coordination/progress/checkpoints.py"
WISHES = "coordination/worker/wishes.py"
DECISIONS = "coordination/generations/decisions.py"
PROGRESS = "coordination/progress/announced.py"
DIRECTORY = "protocol/checkpoints/directory.py"
STORAGE = "storage.py"
EVALUATIONS = "coordination/progress/evaluations.py"
LADDER = "coordination/failures/ladder.py"

SAVE_MUTANTS = (
    Mutant(
        name="newer_checkpoints_take_the_place_of_the_first",
        file=CHECKPOINTS,
        old="            self._drop(min(other for other in self._open if other != self._first))\n",
        new="            self._drop(min(self._open))\n",
        why="with one slow node no checkpoint would ever be whole",
    ),
    Mutant(
        name="a_slow_worker_delays_no_save",
        file=WISHES,
        old=" and Wish.STILL_SAVING not in wishes\n",
        new="\n",
        why="the others would write parts of checkpoints that are never whole",
    ),
    Mutant(
        name="a_requested_save_waits_for_a_slow_one",
        file=WISHES,
        old="    if Wish.SAVE in wishes:\n",
        new="    if Wish.SAVE in wishes and Wish.STILL_SAVING not in wishes:\n",
        why="a node that is about to end has no time for that",
    ),
    Mutant(
        name="checkpoints_that_are_left_out_are_not_counted",
        file=PROGRESS,
        old="            self._left_out.append(done.step)\n",
        new="            pass\n",
        why="that checkpoints are less frequent than asked for must be reported",
    ),
    Mutant(
        name="an_overtaken_part_is_an_alert",
        file=CHECKPOINTS,
        old="        if self._is_overtaken(name) or not self._on_lineage(message):\n",
        new="        if not self._on_lineage(message):\n",
        why="its folder was removed because a newer checkpoint counts",
    ),
    Mutant(
        name="a_checkpoint_is_sealed_before_its_step_is_in_the_record",
        file=CHECKPOINTS,
        old="        turn.change()  # a checkpoint that counts says that its step is committed\n",
        new="",
        why="after a crash the record would not know of a step that a checkpoint in the directory proves",
    ),
    Mutant(
        name="a_state_without_its_dense_part_reaches_a_step",
        file=DECISIONS,
        old="    if holding is None or not holding.dense:\n",
        new="    if holding is None:\n",
        why="a worker that has only experts of a step cannot go on from it",
    ),
    Mutant(
        name="a_checkpoint_is_removed_with_its_manifest_last",
        file=DIRECTORY,
        old='        storage.remove(f"{name}/{MANIFEST}")\n',
        new="",
        why="half of a checkpoint must not look like a whole one",
    ),
    Mutant(
        name="all_evaluations_are_remembered",
        file=EVALUATIONS,
        old="            turn.change(evaluated=dict(list(told.items())[-MAX_EVALUATIONS:]))\n",
        new="            turn.change(evaluated=told)\n",
        why="a member that makes up names fills the record until no store takes it",
    ),
    Mutant(
        name="all_quarantined_nodes_are_remembered",
        file=LADDER,
        old="        turn.change(quarantined=(*others, entry)[-MAX_LISTED:], given_up",
        new="        turn.change(quarantined=(*others, entry), given_up",
        why="nodes that are unfit under ever new names fill the record until no store takes it",
    ),
    Mutant(
        name="files_are_not_synced",
        file=STORAGE,
        tests=("test_synced_storage.py",),
        old="                os.fsync(file.fileno())\n",
        new="",
        why="a checkpoint that counts outlives a power cut",
    ),
    Mutant(
        name="folders_are_not_synced",
        file=STORAGE,
        tests=("test_synced_storage.py",),
        old="            os.replace(draft, final)\n        except BaseException:\n"
        "            draft.unlink(missing_ok=True)\n            raise\n        self._sync_folders(final)\n",
        new="            os.replace(draft, final)\n        except BaseException:\n"
        "            draft.unlink(missing_ok=True)\n            raise\n",
        why="the name of a file is on disk once its folder is synced",
    ),
    Mutant(
        name="the_entry_of_a_checkpoint_s_folder_is_not_synced",
        file=STORAGE,
        tests=("test_synced_storage.py",),
        old="            folder = folder.parent\n            _sync(folder)\n",
        new="            folder = folder.parent\n",
        why="a whole checkpoint would be gone after a power cut",
    ),
    Mutant(
        name="the_entry_of_a_new_directory_is_not_synced",
        file=STORAGE,
        tests=("test_synced_storage.py",),
        old="    for path in missing:\n        _sync(path.parent)\n",
        new="",
        why="all checkpoints would be gone after a power cut",
    ),
    Mutant(
        name="a_step_is_applied_while_the_state_before_it_is_sent",
        file="runtime/session/applying.py",
        tests=("runtime/session/test_applying.py",),
        old="        self._await_push(generation)\n",
        new="",
        why="a worker that joins would be sent parts of two states",
    ),
    Mutant(
        name="a_requested_part_waits_for_a_slow_one",
        file="control/link/checkpoints/lanes.py",
        tests=("control/link/test_checkpoint_lanes.py",),
        old="        return first if first.free else second\n",
        new="        return first\n",
        why="the last save of a job would wait for one that is still being written",
    ),
    Mutant(
        name="a_store_syncs_less",
        file="control/store/sqlite.py",
        tests=("test_synced_stores.py",),
        old='        connection.execute("PRAGMA synchronous = FULL")\n',
        new="",
        why="a record that was announced outlives a power cut, however SQLite was built",
    ),
    Mutant(
        name="the_entry_of_a_store_is_not_synced",
        file="control/store/sqlite.py",
        tests=("test_synced_stores.py",),
        old="        sync_directory(path.parent)\n",
        new="",
        why="the whole store would be gone after a power cut",
    ),
    Mutant(
        name="a_journal_is_not_synced",
        file="observability/journal_file.py",
        tests=("test_synced_stores.py",),
        old="            os.fsync(self._file)\n",
        new="            pass\n",
        why="agents are told to forget what would then be nowhere",
    ),
)
