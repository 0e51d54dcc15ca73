"""Mutants of comparisons between workers of one role: their time, the minority, and the likely cause."""

from __future__ import annotations

from mutant import Mutant

COMPARING = "coordination.worker.comparison"
MISMATCH = "coordination.failures.mismatch"

COMPARISON_MUTANTS = (
    Mutant(
        name="state_is_never_compared",
        module=COMPARING,
        qualname="ReplicaComparison.includes_state",
        old="self._first <= step < self._first + COMPARED_STEPS",
        new="False",
        why="a joined worker may continue training with a different state",
    ),
    Mutant(
        name="state_is_compared_from_the_first_step_of_the_job",
        module=COMPARING,
        qualname="ReplicaComparison.enter_generation",
        old="self._first, self.fingerprint, self.differs = (first, None, False)",
        new="self.fingerprint, self.differs = (None, False)",
        why="every generation must begin with a comparison, since it may have begun with a transfer",
    ),
    Mutant(
        name="nobody_has_received_its_state",
        module=COMPARING,
        qualname="ReplicaComparison.set_fingerprint",
        old="self._received",
        new="False",
        why="of two workers that differ, the one that received its state must be replaced",
    ),
    Mutant(
        name="equal_settings_prove_an_equal_state",
        module=COMPARING,
        qualname="ReplicaComparison.record_agreement",
        old="self.fingerprint is not None and self.fingerprint.state",
        new="self.fingerprint is not None",
        why="only a step with a compared state proves that a transfer has succeeded",
    ),
    Mutant(
        name="half_is_a_majority",
        module=MISMATCH,
        qualname="_find_majority",
        old="2 * len(group) > workers",
        new="2 * len(group) >= workers",
        why="two equal halves do not show which state is right",
    ),
    Mutant(
        name="roles_are_compared_with_each_other",
        module=MISMATCH,
        qualname="find_mismatch",
        old="workers[place::places]",
        new="workers",
        why="workers with other parts of a replica have other states",
    ),
    Mutant(
        name="fingerprints_of_all_versions_are_compared",
        module=MISMATCH,
        qualname="_compare_role",
        old="versions != [VERSION]",
        new="False",
        why="fingerprints of two versions differ although the workers are equal",
    ),
    Mutant(
        name="the_script_is_always_the_cause",
        module=MISMATCH,
        qualname="_compare_role",
        old="TRANSFER if received else SCRIPT",
        new="SCRIPT",
        why="a transfer or a machine may have changed a received state",
    ),
    Mutant(
        name="one_role_without_a_majority_is_forgotten",
        module=MISMATCH,
        qualname="_merge_roles",
        old="next((one for one in found if not one.minority), found[0])",
        new="found[0]",
        why="a job must end if one of its roles cannot be repaired",
    ),
)
