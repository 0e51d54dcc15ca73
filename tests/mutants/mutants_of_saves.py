"""Mutants of checkpoints, of the order of disk writes, and of lists that members could fill."""

from __future__ import annotations

from mutant import Mutant

CHECKPOINTS = "coordination.progress.checkpoints"
WISHES = "coordination.worker.requests"
DECISIONS = "coordination.generations.decisions"
PROGRESS = "coordination.progress.announced"
DIRECTORY = "protocol.checkpoints.directory"
STORAGE = "storage"
EVALUATIONS = "coordination.progress.evaluations"
LADDER = "coordination.failures.escalation"

SAVE_MUTANTS = (
    Mutant(
        name="newer_checkpoints_take_the_place_of_the_first",
        module=CHECKPOINTS,
        qualname="CheckpointBook._on_written",
        old="(other for other in self._open if other != self._first)",
        new="self._open",
        why="with one slow node, no checkpoint would ever be complete",
    ),
    Mutant(
        name="a_slow_worker_delays_no_save",
        module=WISHES,
        qualname="is_save_due",
        old="(due or Wish.SAVE_IF_FREE in wishes) and Wish.STILL_SAVING not in wishes",
        new="due or Wish.SAVE_IF_FREE in wishes",
        why="the others would write parts of checkpoints that never become complete",
    ),
    Mutant(
        name="a_requested_save_waits_for_a_slow_one",
        module=WISHES,
        qualname="is_save_due",
        old="Wish.SAVE in wishes",
        new="Wish.SAVE in wishes and Wish.STILL_SAVING not in wishes",
        why="a node that will soon end has no time to wait",
    ),
    Mutant(
        name="checkpoints_that_are_left_out_are_not_counted",
        module=PROGRESS,
        qualname="Progress._note_left_out",
        old="self._left_out.append(done.step)",
        new="pass",
        why="the job must report that checkpoints are less frequent than requested",
    ),
    Mutant(
        name="an_overtaken_part_is_an_alert",
        module=CHECKPOINTS,
        qualname="CheckpointBook._on_unwritten",
        old="self._is_overtaken(name) or not self._on_lineage(message)",
        new="not self._on_lineage(message)",
        why="its folder was removed because a newer checkpoint counts",
    ),
    Mutant(
        name="a_checkpoint_is_sealed_before_its_step_is_in_the_record",
        module=CHECKPOINTS,
        qualname="CheckpointBook._seal",
        old="transaction.change()",
        new="pass",
        why="after a crash, the record would lack a step that a checkpoint in the directory proves",
    ),
    Mutant(
        name="a_state_without_its_dense_part_reaches_a_step",
        module=DECISIONS,
        qualname="_can_reach",
        old="holding is None or not holding.dense",
        new="holding is None",
        why="a worker with only the experts of a step cannot continue from it",
    ),
    Mutant(
        name="a_checkpoint_is_removed_with_its_manifest_last",
        module=DIRECTORY,
        qualname="remove",
        old="storage.remove(f'{name}/{MANIFEST}')",
        new="pass",
        why="a partly removed checkpoint must not look complete",
    ),
    Mutant(
        name="all_evaluations_are_remembered",
        module=EVALUATIONS,
        qualname="EvaluationBook.on_evaluation_done",
        old="dict(list(reported.items())[-MAX_EVALUATIONS:])",
        new="reported",
        why="a member that invents names would fill the record until no store accepts it",
    ),
    Mutant(
        name="all_quarantined_nodes_are_remembered",
        module=LADDER,
        qualname="EscalationPolicy.quarantine",
        old="(*others, entry)[-MAX_LISTED:]",
        new="(*others, entry)",
        why="unfit nodes with always new names would fill the record until no store accepts it",
    ),
    Mutant(
        name="files_are_not_synced",
        module=STORAGE,
        qualname="LocalStorage.write",
        tests=("test_synced_storage.py",),
        old="os.fsync(file.fileno())",
        new="pass",
        why="a valid checkpoint must survive a power cut",
    ),
    Mutant(
        name="folders_are_not_synced",
        module=STORAGE,
        qualname="LocalStorage.write",
        tests=("test_synced_storage.py",),
        old="self._sync_folders(final)",
        new="pass",
        why="a file name is on disk only after its folder is synced",
    ),
    Mutant(
        name="the_entry_of_a_checkpoint_s_folder_is_not_synced",
        module=STORAGE,
        qualname="LocalStorage._sync_folders",
        tests=("test_synced_storage.py",),
        old=("folder = folder.parent\n_sync(folder)"),
        new="folder = folder.parent",
        why="a complete checkpoint would be lost after a power cut",
    ),
    Mutant(
        name="the_entry_of_a_new_directory_is_not_synced",
        module=STORAGE,
        qualname="_make_folder",
        tests=("test_synced_storage.py",),
        old=("for path in missing:\n    _sync(path.parent)"),
        new="pass",
        why="all checkpoints would be lost after a power cut",
    ),
    Mutant(
        name="a_step_is_applied_while_the_state_before_it_is_sent",
        module="runtime.session.applying",
        qualname="StepApplier.apply_step",
        tests=("runtime/session/test_applying.py",),
        old="self._await_sent_state(generation)",
        new="pass",
        why="a joining worker would receive parts of two states",
    ),
    Mutant(
        name="a_requested_part_waits_for_a_slow_one",
        module="control.link.checkpoints.lanes",
        qualname="CheckpointLanes._lane_for",
        tests=("control/link/test_checkpoint_lanes.py",),
        old="first if first.is_free else second",
        new="first",
        why="the last save of a job would wait for one that is still being written",
    ),
    Mutant(
        name="a_store_syncs_less",
        module="control.store.sqlite",
        qualname="_connect",
        tests=("test_synced_stores.py",),
        old="connection.execute('PRAGMA synchronous = FULL')",
        new="pass",
        why="an announced record must survive a power cut, however SQLite was built",
    ),
    Mutant(
        name="the_entry_of_a_store_is_not_synced",
        module="control.store.sqlite",
        qualname="_create",
        tests=("test_synced_stores.py",),
        old="sync_directory(path.parent)",
        new="pass",
        why="the whole store would be lost after a power cut",
    ),
    Mutant(
        name="a_journal_is_not_synced",
        module="observability.journal_file",
        qualname="FileJournal.sync",
        tests=("test_synced_stores.py",),
        old="os.fsync(self._file)",
        new="pass",
        why="agents would be told to forget data that exists nowhere else",
    ),
)
