"""Mutants of what workers of one role compare: what is compared when, who is in the minority, and the likely cause."""

from __future__ import annotations

from mutant import Mutant

COMPARING = "coordination/worker/comparing.py"
MISMATCH = "coordination/failures/mismatch.py"

COMPARISON_MUTANTS = (
    Mutant(
        name="state_is_never_compared",
        file=COMPARING,
        old="return self._first <= step < self._first + COMPARED_STEPS",
        new="return False",
        why="a worker that has joined may train on to another state",
    ),
    Mutant(
        name="state_is_compared_from_the_first_step_of_the_job",
        file=COMPARING,
        old="self._first, self.fingerprint, self.differs = first, None, False",
        new="self.fingerprint, self.differs = None, False",
        why="every generation begins with a comparison, since it may have begun with a transfer",
    ),
    Mutant(
        name="nobody_has_received_its_state",
        file=COMPARING,
        old="replace(fingerprint, received=self._received), False",
        new="replace(fingerprint, received=False), False",
        why="of two workers that differ, the one that has received its state is replaced",
    ),
    Mutant(
        name="equal_settings_prove_an_equal_state",
        file=COMPARING,
        old="if self.fingerprint is not None and self.fingerprint.state:",
        new="if self.fingerprint is not None:",
        why="only a step in which the state was compared proves that a transfer has succeeded",
    ),
    Mutant(
        name="half_is_a_majority",
        file=MISMATCH,
        old="if 2 * len(group) > workers:",
        new="if 2 * len(group) >= workers:",
        why="of two halves nobody knows which is right",
    ),
    Mutant(
        name="roles_are_compared_with_each_other",
        file=MISMATCH,
        old="for worker in workers[place::places] if worker in reports",
        new="for worker in workers if worker in reports",
        why="workers that hold other parts of a replica have other states",
    ),
    Mutant(
        name="fingerprints_of_all_versions_are_compared",
        file=MISMATCH,
        old="if versions != [VERSION]:",
        new="if False:",
        why="fingerprints of two versions differ although the workers are equal",
    ),
    Mutant(
        name="the_script_is_always_the_cause",
        file=MISMATCH,
        old="likely_cause=TRANSFER if received else SCRIPT",
        new="likely_cause=SCRIPT",
        why="a transfer, or a machine, may have changed a state that was sent",
    ),
    Mutant(
        name="one_role_without_a_majority_is_forgotten",
        file=MISMATCH,
        old="first = next((one for one in found if not one.minority), found[0])",
        new="first = found[0]",
        why="a job with a role that nobody can repair must end",
    ),
)
