"""Mutants of how it is found out who holds a job up: times learnt, limits, whose fault it is."""

from __future__ import annotations

from mutant import Mutant

TIMES = "coordination/lateness/times.py"
WATCH = "coordination/lateness/watch.py"
READING = "coordination/lateness/reading.py"
JUDGE = "coordination/lateness/judge.py"
OWN_WORK = "coordination/lateness/own_work.py"
INQUIRY = "coordination/lateness/inquiry.py"
PACE = "coordination/lateness/pace.py"
STORIES = "coordination/lateness/stories.py"
STRAGGLERS = "coordination/lateness/stragglers.py"

LATENESS_MUTANTS = (
    # ---- what is usual ----
    Mutant(
        name="one_example_is_usual",
        file=TIMES,
        old="WARM_UP = 3\n",
        new="WARM_UP = 1\n",
        why="the first ones compile, allocate and connect",
    ),
    Mutant(
        name="what_is_late_becomes_usual",
        file=TIMES,
        old="            mean_s = min(mean_s, self.limit_s)\n",
        new="            pass\n",
        why="one hang would make every later one usual",
    ),
    Mutant(
        name="evaluations_are_hangs",
        file=TIMES,
        old="        return max(limit_s, LONGEST * self._longest[activity]) if activity in UNEVEN else limit_s\n",
        new="        return limit_s\n",
        why="what is long now and then has been as long before",
    ),
    Mutant(
        name="short_phases_are_late_within_a_step",
        file=TIMES,
        old="STEPS_LONGER = 1.5\n",
        new="STEPS_LONGER = 0.0\n",
        why="what is short varies most: on a busy machine a healthy worker would be ended",
    ),
    Mutant(
        name="other_worlds_take_as_long",
        file=TIMES,
        old="            limit_s = OTHER_WORLD * max(others)\n",
        new="            limit_s = max(others)\n",
        why="shares and partners are others",
    ),
    # ---- an agent's part ----
    Mutant(
        name="agent_away_counts_against_workers",
        file=WATCH,
        old="            self._away.append((self._last, now))\n",
        new="            pass\n",
        why="all of the machine stood still, perhaps",
    ),
    Mutant(
        name="who_has_no_core_is_late",
        file=WATCH,
        old="    return max(0.0, total_s - starved.before_s) + max(0.0, max(others_s, default=0.0))\n",
        new="    return 0.0\n",
        why="on a machine with too much to do, nodes were taken out for hanging that only waited for a core",
    ),
    Mutant(
        name="a_wait_for_a_core_counts_once_it_is_over",
        file=READING,
        old="            waited[thread] = clock.waited_s + (now - known.ready_since if clock.ready else 0.0)\n",
        new="            waited[thread] = clock.waited_s\n",
        why="a thread may be ready for half a second, and the kernel has counted nothing yet",
    ),
    Mutant(
        name="who_has_no_core_waits_for_the_network",
        file=WATCH,
        old="        return 0.0 if since is None else max(0.0, now - since - starved_s)\n",
        new="        return 0.0 if since is None else max(0.0, now - since)\n",
        why="on a loaded node all wait longer than usual, and steps were tried again for nothing",
    ),
    Mutant(
        name="a_loaded_nodes_agent_is_silent",
        file=INQUIRY,
        old="        self._answers.came(node.name, now - self._silent_since.pop(node.name, now), now)\n",
        new="        self._silent_since.pop(node.name, now)\n",
        why="it was given up where its agent had no core for 0.2 s",
    ),
    Mutant(
        name="late_is_told_once",
        file=WATCH,
        old="                seen.next_at = AGAIN * for_s / limit_s\n",
        new="                seen.next_at = 1e9\n",
        why="a coordinator that was away, or busy with another, would never hear of it",
    ),
    Mutant(
        name="late_is_told_at_every_look",
        file=WATCH,
        old="                seen.next_at = AGAIN * for_s / limit_s\n",
        new="                pass\n",
        why="it costs messages, and says nothing new",
    ),
    Mutant(
        name="times_of_two_worlds_are_one",
        file=WATCH,
        old="            if world == reading.world:  # (else nobody knows which of it was in which)\n",
        new="            if True:\n",
        why="steps of few workers would be the limit for many",
    ),
    # ---- whose fault it is ----
    Mutant(
        name="late_where_nobody_waits",
        file=JUDGE,
        old="    if hung and len(nodes | {*silent}) <= max(1, len(waiting)) and waiting:\n",
        new="    if hung:\n",
        why="being late is no guilt",
    ),
    Mutant(
        name="few_wait_for_many",
        file=JUDGE,
        old="    if hung and len(nodes | {*silent}) <= max(1, len(waiting)) and waiting:\n",
        new="    if hung and waiting:\n",
        why="where more are busy than wait it is what they have to do",
    ),
    Mutant(
        name="waiting_is_hanging",
        file=JUDGE,
        old="        return still.overdue and stand.late  # it does not look\n",
        new="        return still.overdue\n",
        why="who waits and looks holds nobody up",
    ),
    Mutant(
        name="a_stopped_process_is_slow",
        file=INQUIRY,
        old="for at in (self.pace.stopped_at, self.pace.overdue_at))\n",
        new="for at in (self.pace.overdue_at,))\n",
        why="a process that is stopped would be waited for as if it were at work",
    ),
    Mutant(
        name="network_where_somebody_is_at_work",
        file=JUDGE,
        old="all(is_waiting(stand) for stand in stands)\n",
        new="any(is_waiting(stand) for stand in stands)\n",
        why="a long step would be broken off, again and again",
    ),
    Mutant(
        name="first_steps_may_last_for_ever",
        file=JUDGE,
        old="    return stand.for_s > max(unknown_s, FAILURE * others_s + FLOOR_S)\n",
        new="    return False\n",
        why="a hang in the first step would wait for the collective's own time-out",
    ),
    Mutant(
        name="first_steps_are_compared_with_nobody",
        file=JUDGE,
        old="    return stand.for_s > max(unknown_s, FAILURE * others_s + FLOOR_S)\n",
        new="    return stand.for_s > unknown_s\n",
        why="compiling takes minutes, and some are a little later than others",
    ),
    # ---- what is done about it ----
    Mutant(
        name="slow_work_takes_node_after_node",
        file=OWN_WORK,
        old="            if at_work.count(place) > 1 or not self._is_first(place, stand.worker):\n",
        new="            if not self._is_first(place, stand.worker) and False:\n",
        why="a long sequence is as long on the second node",
    ),
    Mutant(
        name="kept_share_is_ended_again_and_again",
        file=OWN_WORK,
        old="max(AGAIN_LONGER ** sum(node_of(one) == node for one in before), SEVERAL",
        new="max(1.0, SEVERAL",
        why="with a rank that is kept, the same node computes the same long sequence in each process",
    ),
    Mutant(
        name="every_long_sequence_costs_a_process",
        file=OWN_WORK,
        old="        return max(stand.limit_s * factor, ROOM * self._slow_s(stand.activity))\n",
        new="        return stand.limit_s * factor\n",
        why="each of them would cost a process",
    ),
    Mutant(
        name="slow_work_is_learnt_at_suspicion",
        file=OWN_WORK,
        old="        if state.slow:\n            self._learn(stand)\n",
        new="        if state.slow:\n            pass\n",
        why="the limit would not cover what the work takes in the end, and each sample of 3 s would cost a process",
    ),
    Mutant(
        name="slow_work_counts_against_nodes",
        file=OWN_WORK,
        old="            state.trials.clear()\n",
        new="            pass\n",
        why="healthy nodes would be quarantined for a slow sample",
    ),
    Mutant(
        name="kills_on_trial_never_count",
        file=OWN_WORK,
        old="                    self._count(trial)\n",
        new="                    pass\n",
        why="a node whose workers hang again and again would stay",
    ),
    Mutant(
        name="a_verdict_does_not_wait",
        file=OWN_WORK,
        old="                state.verdict_at = now + VERDICT_S\n",
        new="                state.verdict_at = now\n",
        why="the end of slow work is reported after the step is committed",
    ),
    Mutant(
        name="slow_work_ends_unreported",
        file=WATCH,
        old="        if seen.next_at == 1.0 and took_s < self._expected",
        new="        if took_s < self._expected",
        why="how long it took in the end is known to the agent alone",
    ),
    Mutant(
        name="survivors_with_longer_limits_clear_nobody",
        file=WATCH,
        old="        self._expected[place] = work.for_s\n",
        new="        pass\n",
        why="a survivor that is not late by its own limit needed as long all the same",
    ),
    Mutant(
        name="new_processes_are_as_fast_as_old_ones",
        file=WATCH,
        old="        if total is None or total.count < WARM_UP:\n",
        new="        if False:\n",
        why="a worker that comes back compiles in its first step",
    ),
    Mutant(
        name="script_is_ended_again_and_again",
        file=OWN_WORK,
        old="                self._script_factor *= AGAIN_LONGER\n",
        new="                pass\n",
        why="what a script does between steps may take any time",
    ),
    Mutant(
        name="first_step_is_ended_again_and_again",
        file=INQUIRY,
        old="                self._unknown_s *= AGAIN_LONGER\n",
        new="                pass\n",
        why="a node that compiles for longer would be ended each time",
    ),
    Mutant(
        name="answers_of_before_count",
        file=INQUIRY,
        old="        if question is None or answer.number != question.number or node.name not in question.asked:\n",
        new="        if question is None or node.name not in question.asked:\n",
        why="where somebody stood then says nothing of now",
    ),
    Mutant(
        name="judged_before_all_have_answered",
        file=INQUIRY,
        old="        if len(silent) < len(missing):\n",
        new="        if False:\n",
        why="who waits for whom is known of all or of nobody",
    ),
    Mutant(
        name="first_steps_are_the_networks_fault",
        file=INQUIRY,
        old="        looks = finding.network and not recovering and self.pace.known and self._looked",
        new="        looks = finding.network and not recovering and self._looked",
        why="a first reduction that takes long would be broken off, each time anew",
    ),
    Mutant(
        name="away_coordinator_finds_all_silent",
        file=INQUIRY,
        old="            self._silent_since = {name: since + away_s for name, since in self._silent_since.items()}\n",
        new="            pass\n",
        why="answers may wait to be read",
    ),
    Mutant(
        name="outage_is_a_slow_step",
        file=PACE,
        old="        self._step, self.since = 0, now\n",
        new="        pass\n",
        why="what happened while the coordinator was away is not known",
    ),
    # ---- leases ----
    Mutant(
        name="lease_forgets_the_window_before",
        file="coordination/nodes/learnt_lease.py",
        old="        return FAILURE * max(self.before_s, self.longest_s) + FLOOR_S\n",
        new="        return FAILURE * self.longest_s + FLOOR_S\n",
        why="a new window has seen next to nothing",
    ),
    Mutant(
        name="late_coordinator_relies_on_learnt_leases",
        file="coordination/coordinator.py",
        old="        in_time = now - self._late_tick > config.lease_s\n",
        new="        in_time = True\n",
        why="words may wait to be read",
    ),
    # ---- what is told of it ----
    Mutant(
        name="story_is_never_told_where_one_is_missing",
        file=STORIES,
        old="        if story is not None and self._turn.now - story.at > ANSWER_S:\n",
        new="        if story is not None and not story.open:\n",
        why="who hangs may not be able to say where",
    ),
    Mutant(
        name="straggler_is_compared_with_itself",
        file=STRAGGLERS,
        old="    low, high = ((index if index < place else index + 1) for index in ((left - 1) // 2, left // 2))\n",
        new="    low, high = (left - 1) // 2, left // 2\n",
        why="of two the slower one would be as fast as itself",
    ),
)
