"""What is tried on which board, which candidate wins, and when a stored result is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from edgellm import render
from edgellm.cpuset import CpuSet
from edgellm.hardware import HostProfile
from edgellm.measured import (
    CRITICAL_T,
    MIN_ROUNDS,
    PLANNED,
    Candidate,
    Choice,
    MeasuredResult,
    ResultKey,
    Trial,
    apply_measured,
    candidates,
    changed_plan,
    choose,
    conditions,
    fits_beside_the_service,
    plain_start,
    progress_line,
    result_key,
    table_lines,
    trials_of,
)
from edgellm.settings import Settings
from edgellm.trial_job import command_bits, environment, live_units_stopped, trial_job
from edgellm.tuning import TuningPlan, plan_tuning
from edgellm_server import trial

MODEL = "0" * 64
RUNTIME_ID = "a1b2c3d4e5f60718"
TRIED = (
    Candidate.of(PLANNED),
    Candidate.of("threads 3", threads=3),
    Candidate.of("scheduling other", scheduling="other"),
)
# Two of a hundred up and down, as a quiet board has it; mean of logs about 0
NOISE = (1.0, 1.02, 0.98, 1.01, 0.99, 1.0, 0.98, 1.02)

Board = Callable[[str], HostProfile]
SettingsWith = Callable[..., Settings]


def names(found: Sequence[Candidate]) -> list[str]:
    return [candidate.name for candidate in found]


def trials(factors: dict[str, dict[str, float]], *, rounds: int = 6, **changed: Any) -> list[Trial]:
    """Rounds of noise; `factors`: candidate -> condition -> its true time over the plan's."""
    found = []
    for number in range(rounds):
        for index, candidate in enumerate(TRIED):
            for condition, base_ms in (("idle", 500.0), ("loaded", 900.0)):
                time_ms = base_ms * NOISE[(number + 3 * index) % len(NOISE)]
                time_ms *= factors.get(candidate.name, {}).get(condition, 1.0)
                found.append(
                    Trial(
                        candidate=candidate.name,
                        round=number,
                        condition=condition,
                        ttft_ms=time_ms / 5,
                        tpot_ms=time_ms * 4 / 5 / 24,
                        **changed,
                    )
                )
    return found


# What is tried


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("firecracker-vm", ["threads 1"]),
        ("raspberry-pi-5", ["threads 2", "cpus 0-3, threads 4"]),
        ("rk3588", ["threads 3", "cpus 0-7, threads 8"]),
        ("orion-o6", ["threads 7", "cpus 0-11, threads 12"]),
        ("i5-8250u", ["threads 2", "threads 6", "cpus 0-7, threads 4"]),
        ("ampere-altra", ["threads 8", "threads 32"]),
    ],
)
def test_threads_and_cores_that_make_sense_on_a_board_are_tried(
    name: str, expected: list[str], board: Board, settings_with: SettingsWith
) -> None:
    profile, settings = board(name), settings_with()
    tried = names(candidates(plan_tuning(profile, settings), profile, settings))
    assert tried[0] == PLANNED
    assert [one for one in tried if one.startswith(("threads", "cpus"))] == expected
    assert tried[len(expected) + 1 :][:4] == [
        "scheduling other",
        "cpu_weight 3000",
        "omp_wait_policy PASSIVE",
        "n_batch 128",
    ]
    assert len(tried) <= 8


def test_under_a_quota_neither_more_threads_nor_spinning_is_tried(
    board: Board, settings_with: SettingsWith
) -> None:
    profile, settings = board("cloud-vm-quota"), settings_with()
    tried = names(candidates(plan_tuning(profile, settings), profile, settings))
    assert tried == [PLANNED, "scheduling other", "cpu_weight 3000", "n_batch 128", "n_batch 32"]


def test_what_the_inventory_sets_is_not_tried(board: Board, settings_with: SettingsWith) -> None:
    settings = settings_with(threads=2, scheduling="other", cpu_weight=300, n_batch=32)
    profile = board("rk3588")
    tried = names(candidates(plan_tuning(profile, settings), profile, settings))
    assert tried == [PLANNED, "omp_wait_policy PASSIVE"]


def test_all_cpus_are_held_by_nothing_and_the_small_ones_work_too(
    board: Board, settings_with: SettingsWith
) -> None:
    profile, settings = board("rk3588"), settings_with()
    plan = plan_tuning(profile, settings)
    assert str(plan.allowed_cpus) == "4-7"
    (every,) = [c for c in candidates(plan, profile, settings) if c.name.startswith("cpus")]
    changed = changed_plan(plan, profile, every.changes)
    assert (str(changed.cpus), changed.allowed_cpus, changed.affinity) == ("0-7", None, None)
    assert (changed.engine.n_threads, changed.engine.n_threads_batch) == (8, 8)
    assert changed.worker_cpus == (CpuSet.parse("0-7"),)
    assert changed_plan(plan, profile, ()) == plan


def test_a_crowd_is_measured_only_where_two_requests_run_at_once(
    board: Board, settings_with: SettingsWith
) -> None:
    profile = board("raspberry-pi-5")
    assert conditions(plan_tuning(profile, settings_with())) == ("idle", "crowded", "loaded")
    assert conditions(plan_tuning(profile, settings_with(n_parallel=1))) == ("idle", "loaded")


# Which one wins


def test_a_candidate_that_is_faster_everywhere_wins() -> None:
    choice = choose(trials({"threads 3": {"idle": 0.85, "loaded": 0.85}}), TRIED)
    assert (choice.candidate, choice.changes) == ("threads 3", (("threads", 3),))
    assert "-15 % idle" in choice.why
    assert "n=6" in choice.why
    assert choice.conclusive


def test_one_condition_is_enough_where_the_other_is_no_slower() -> None:
    choice = choose(trials({"threads 3": {"loaded": 0.8}}), TRIED)
    assert choice.candidate == "threads 3"


def test_a_gain_at_the_price_of_the_other_condition_does_not_win() -> None:
    choice = choose(trials({"threads 3": {"loaded": 0.8, "idle": 1.08}}), TRIED)
    assert choice.keeps_the_plan
    assert choice.why == "no candidate was faster by more than the noise (n=6)"


def test_of_two_the_faster_over_all_conditions_wins() -> None:
    choice = choose(
        trials({"threads 3": {"loaded": 0.8}, "scheduling other": {"loaded": 0.8, "idle": 0.8}}),
        TRIED,
    )
    assert choice.candidate == "scheduling other"


def test_a_gain_that_nobody_notices_leaves_the_plan() -> None:
    assert (
        choose(trials({"threads 3": {"idle": 0.98, "loaded": 0.98}}, rounds=12), TRIED).changes
        == ()
    )


def test_noise_leaves_the_plan() -> None:
    choice = choose(trials({}), TRIED)
    assert (choice.candidate, choice.changes, choice.conclusive) == (PLANNED, (), True)


def test_too_few_rounds_leave_the_plan_and_are_not_conclusive() -> None:
    found = trials({"threads 3": {"idle": 0.5, "loaded": 0.5}}, rounds=MIN_ROUNDS - 1)
    choice = choose(found, TRIED)
    assert choice.keeps_the_plan
    assert not choice.conclusive
    assert choice.why.startswith("4 rounds of the 5 that tell something from noise")
    assert not choose([], TRIED).conclusive


def test_candidates_that_were_all_let_go_for_being_slower_are_conclusive() -> None:
    slow = {name: {"idle": 1.1, "loaded": 1.1} for name in ("threads 3", "scheduling other")}
    choice = choose(trials(slow, rounds=2), TRIED)
    assert choice.conclusive
    assert choice.why == "no candidate was faster in the first rounds"


def test_from_the_first_throttled_round_on_nothing_counts() -> None:
    cool = trials({"threads 3": {"idle": 0.85, "loaded": 0.85}}, rounds=8)
    hot = [replace(t, throttled=t.round == 6 and t.candidate == PLANNED) for t in cool]
    assert choose(hot, TRIED).standings[0].n == 6
    assert choose(hot, TRIED).candidate == "threads 3"
    sooner = [replace(t, throttled=t.round == 3) for t in cool]
    choice = choose(sooner, TRIED)
    assert choice.keeps_the_plan
    assert not choice.conclusive
    assert "throttle in round 4" in choice.why


def test_trials_that_others_disturbed_do_not_count() -> None:
    fast = trials({"threads 3": {"idle": 0.5, "loaded": 0.5}})
    disturbed = [replace(t, disturbed=t.round >= 4) for t in fast]
    assert not choose(disturbed, TRIED).conclusive


def test_a_candidate_that_misses_a_condition_cannot_win() -> None:
    fast = trials({"threads 3": {"idle": 0.5}})
    found = [t for t in fast if (t.candidate, t.condition) != ("threads 3", "loaded")]
    assert choose(found, TRIED).keeps_the_plan


def test_control_and_host_agree_on_the_fewest_rounds_and_on_a_request() -> None:
    assert trial.MIN_ROUNDS == MIN_ROUNDS == min(CRITICAL_T)
    found = trial.Figures("a", 0, "idle", 100.0, 10.0, 3, None, None, None, False)
    ours = Trial(candidate="a", round=0, condition="idle", ttft_ms=100.0, tpot_ms=10.0)
    assert found.request_ms == ours.request_ms == 340.0


# The result


@pytest.fixture
def pi(board: Board) -> HostProfile:
    return board("raspberry-pi-5")


@pytest.fixture
def plan(pi: HostProfile, settings_with: SettingsWith) -> TuningPlan:
    return plan_tuning(pi, settings_with())


def key_of(profile: HostProfile, plan: TuningPlan, **changed: str) -> ResultKey:
    given = {"model_sha256": MODEL, "runtime_id": RUNTIME_ID, **changed}
    return result_key(profile, plan=plan, **given)


def result(key: ResultKey, **changes: Any) -> MeasuredResult:
    measured = choose(trials({"threads 3": {"idle": 0.85, "loaded": 0.9}}), TRIED)
    candidate = Candidate.of("the winner", **changes)
    choice = replace(measured, candidate=candidate.name, changes=candidate.changes)
    return MeasuredResult(
        key=key, choice=choice, measured_on="2026-12-02", duration_s=431.5, ended="rounds: 12"
    )


def test_result_is_one_text_and_reads_back(pi: HostProfile, plan: TuningPlan) -> None:
    stored = result(key_of(pi, plan), threads=2, omp_wait_policy=None)
    text = stored.to_json_text()
    assert MeasuredResult.parse(text) == stored
    assert result(key_of(pi, plan), omp_wait_policy=None, threads=2).to_json_text() == text
    assert json.loads(text)["choice"]["changes"] == {"omp_wait_policy": None, "threads": 2}


@pytest.mark.parametrize(
    "damage",
    [
        {"threads": 0},
        {"threads": "3"},
        {"threads": True},
        {"cpus": "7-3"},
        {"cpus": ""},
        {"scheduling": "fifo"},
        {"cpu_weight": 99999},
        {"mlock": 1},
        {"omp_wait_policy": "ACTIVE\nEDGELLM_APP=x"},
    ],
)
def test_result_with_a_knob_or_value_that_is_not_tried_is_no_result(
    damage: dict[str, Any], pi: HostProfile, plan: TuningPlan
) -> None:
    values = json.loads(result(key_of(pi, plan), threads=2).to_json_text())
    values["choice"]["changes"] = damage
    assert MeasuredResult.parse(json.dumps(values)) is None


@pytest.mark.parametrize(
    "text", [None, "", "null", "[]", "{}", "{", '{"schema_version": 2}', "[" * 100_000]
)
def test_text_that_is_no_result_is_none(text: str | None) -> None:
    assert MeasuredResult.parse(text) is None


def test_stored_result_of_the_same_host_changes_the_plan_and_its_reasons(
    pi: HostProfile, plan: TuningPlan
) -> None:
    key = key_of(pi, plan)
    stored = replace(pi, measured_json=result(key, threads=2).to_json_text())
    tuned, said = apply_measured(plan, stored, key)
    assert tuned.engine == replace(plan.engine, n_threads=2)
    assert said is not None
    assert said.startswith("the winner, measured on this host on 2026-12-02; ")
    reasons = {reason.knob: reason for reason in tuned.reasons}
    assert reasons["threads"].text == "2: measured on this host on 2026-12-02"
    assert reasons["measured"].text == said
    assert [r.knob for r in tuned.reasons].count("threads") == 1
    # The reasons that it does not touch stay as they were
    others = [r for r in plan.reasons if r.knob != "threads"]
    assert [r for r in tuned.reasons if r.knob not in ("threads", "measured")] == others


def test_wider_cpus_take_their_reasons_with_them(pi: HostProfile, plan: TuningPlan) -> None:
    key = key_of(pi, plan)
    stored = result(key, cpus="0-3", threads=4, threads_batch=4)
    tuned, _ = apply_measured(plan, replace(pi, measured_json=stored.to_json_text()), key)
    texts = {r.knob: r.text for r in tuned.reasons}
    assert texts["allowed_cpus"] == "the server may use all of 0-3: nothing to restrict"
    assert texts["cpus"] == "0-3: measured on this host on 2026-12-02"


def test_stored_result_that_keeps_the_plan_is_said_and_changes_nothing(
    pi: HostProfile, plan: TuningPlan
) -> None:
    key = key_of(pi, plan)
    stored = replace(pi, measured_json=result(key).to_json_text())
    tuned, said = apply_measured(plan, stored, key)
    assert replace(tuned, reasons=()) == replace(plan, reasons=())
    assert said is not None
    assert said.startswith("the plan stands, as measured here on 2026-12-02")


def test_without_a_result_the_plan_is_as_it_is(pi: HostProfile, plan: TuningPlan) -> None:
    assert apply_measured(plan, pi, key_of(pi, plan)) == (plan, None)


def test_result_of_another_kernel_model_runtime_or_plan_is_not_used_and_said(
    pi: HostProfile, plan: TuningPlan, settings_with: SettingsWith
) -> None:
    text = result(key_of(pi, plan), threads=2).to_json_text()
    newer = replace(pi, measured_json=text, kernel=replace(pi.kernel, release="6.12.1"))
    other_plan = plan_tuning(pi, settings_with(n_ctx=1024))
    here = replace(pi, measured_json=text)
    for profile, base, key, word in (
        (newer, plan, key_of(newer, plan), f"kernel {pi.kernel.release} -> 6.12.1"),
        (here, plan, key_of(here, plan, model_sha256="f" * 64), "another model"),
        (here, plan, key_of(here, plan, runtime_id="other"), "another runtime"),
        (here, other_plan, key_of(here, other_plan), "another plan"),
    ):
        tuned, said = apply_measured(base, profile, key)
        assert replace(tuned, reasons=()) == replace(base, reasons=())
        assert said == (
            f"the result of 2026-12-02 is not used ({word}): deploys/tune.py measures anew"
        )
        assert tuned.reasons[0].left_alone


@pytest.mark.parametrize("changes", [{"cpus": "0-7"}, {"threads": 40}])
def test_result_with_cpus_that_are_not_here_is_not_used(
    changes: dict[str, Any], pi: HostProfile, plan: TuningPlan
) -> None:
    key = key_of(pi, plan)
    text = result(key, **changes).to_json_text()
    tuned, said = apply_measured(plan, replace(pi, measured_json=text), key)
    assert replace(tuned, reasons=()) == replace(plan, reasons=())
    assert said is not None
    assert "CPUs that are not here" in said


def test_unreadable_result_is_not_used_and_said(pi: HostProfile, plan: TuningPlan) -> None:
    broken = replace(pi, measured_json="{")
    tuned, said = apply_measured(plan, broken, key_of(pi, plan))
    assert tuned.engine == plan.engine
    assert said is not None
    assert "cannot be read" in said


def test_key_does_not_hang_on_what_no_candidate_depends_on(
    pi: HostProfile, plan: TuningPlan
) -> None:
    same = replace(plan, reasons=(), packages=("numactl",), swappiness=1, memory_needed_bytes=1)
    assert key_of(pi, same) == key_of(pi, plan)
    assert key_of(pi, replace(plan, cpu_weight=1)) != key_of(pi, plan)


# The job, and what the operator sees


def job_of(profile: HostProfile, settings: Settings, **more: Any) -> dict[str, Any]:
    plan = plan_tuning(profile, settings)
    tried = more.pop("tried", candidates(plan, profile, settings))
    return trial_job(
        tried, plan, profile, settings, model_sha256=MODEL, runtime_id=RUNTIME_ID, **more
    )


def test_planned_candidate_is_what_a_roll_out_would_start(
    pi: HostProfile, settings_with: SettingsWith
) -> None:
    settings = settings_with()
    plan = plan_tuning(pi, settings)
    files = {f.name: f.content for f in render.release_files(plan, settings, ())}
    job = job_of(pi, settings)
    planned, fewer = job["candidates"][:2]
    assert planned["entrypoint"] == files["entrypoint.sh"]
    assert planned["slice_text"] == files["edgellm.slice"]
    assert planned["environ"] == {
        **environment(files["server.env"]),
        "EDGELLM_MODEL_PATH": f"/opt/edgellm/models/{MODEL}.gguf",
    }
    assert planned["environ"]["EDGELLM_N_THREADS"] == "3"
    assert fewer["environ"] == planned["environ"] | {"EDGELLM_N_THREADS": "2"}
    assert job["hot_c"] == 80.0
    assert job["neighbours"] == 4


def test_job_is_one_that_the_host_reads(pi: HostProfile, settings_with: SettingsWith) -> None:
    job = trial.Job.from_json(json.dumps(job_of(pi, settings_with(tune_budget_s=90))))
    assert job.baseline == PLANNED
    assert job.budget_s == 90
    assert job.conditions == ("idle", "crowded", "loaded")


def test_default_start_can_be_measured_against_the_plan(
    pi: HostProfile, settings_with: SettingsWith
) -> None:
    settings = settings_with()
    plan = plan_tuning(pi, settings)
    tried = (Candidate.of(PLANNED), plain_start(pi, plan))
    job = job_of(pi, settings, tried=tried, unplaced=("plain start",))
    _, plain = job["candidates"]
    assert plain["slice_text"] is None
    assert plain["environ"]["EDGELLM_N_THREADS"] == "4"
    assert plain["environ"]["EDGELLM_N_BATCH"] == "2048"
    assert plain["environ"]["EDGELLM_MLOCK"] == "0"
    assert "OMP_WAIT_POLICY" not in plain["environ"]
    assert "chrt" not in plain["entrypoint"]
    assert "taskset" not in plain["entrypoint"]


def test_system_prompt_and_own_app_do_not_point_into_another_release(
    pi: HostProfile, settings_with: SettingsWith
) -> None:
    settings = settings_with(
        system_prompt="Be brief.", server_app="main:app", server_app_dir="/somewhere"
    )
    job = job_of(pi, settings)
    assert job["system_prompt"] == "Be brief."
    for candidate in job["candidates"]:
        assert not {"EDGELLM_SYSTEM_PROMPT_FILE", "EDGELLM_APP"} & candidate["environ"].keys()


def test_live_service_is_stopped_only_where_a_second_server_has_no_room(
    pi: HostProfile, settings_with: SettingsWith
) -> None:
    plan = plan_tuning(pi, settings_with())
    assert fits_beside_the_service(plan, pi)
    assert live_units_stopped(job_of(pi, settings_with())) is None
    small = replace(pi, mem_available_bytes=2_700_000_000, mem_own_bytes=0)
    assert fits_beside_the_service(plan_tuning(small, settings_with()), small)
    # The same host with our service up: what it holds is counted as free for it, not for two
    served = replace(pi, mem_available_bytes=1_700_000_000, mem_own_bytes=1_000_000_000)
    job = job_of(served, settings_with())
    assert job["stop_service"]
    announced = live_units_stopped(job)
    assert announced is not None
    assert "stopped while it is measured" in announced


def test_unit_of_the_trials_cleans_up_however_it_ends(plan: TuningPlan) -> None:
    bits = command_bits(RUNTIME_ID, plan, ends_within_s=900)
    assert bits[0] == "systemd-run"
    assert (
        '--property=ExecStopPost=/bin/sh -c "exec python3 -s -B -m edgellm_server.trial clean-up"'
        in bits
    )
    assert "--property=RuntimeMaxSec=900" in bits
    assert f"--setenv=PYTHONPATH=/opt/edgellm/runtimes/{RUNTIME_ID}" in bits
    assert bits[-5:] == ["python3", "-s", "-B", "-m", "edgellm_server.trial"]


def test_events_become_trials_and_lines() -> None:
    event = {
        **{"event": "trial", "candidate": "threads 3", "round": 2, "condition": "loaded"},
        **{"ttft_ms": 181.4, "tpot_ms": 30.25, "n": 3, "temperature_c": 61.2},
        **{"cpu_freq_khz": 2400000, "throttled": False, "disturbed": True, "left_s": 300},
    }
    end = {"event": "end", "why": "rounds", "detail": "", "duration_s": 12.0}
    (found,) = trials_of([event, end])
    assert (found.candidate, found.round, found.ttft_ms, found.disturbed) == (
        "threads 3",
        2,
        181.4,
        True,
    )
    assert progress_line(event) == (
        "round 3, threads 3, loaded: TTFT 181 ms, then 30.2 ms a token "
        "[61 C, disturbed, not counted]; 300 s left"
    )
    assert progress_line(end) is None


def test_table_marks_the_winner(pi: HostProfile, plan: TuningPlan) -> None:
    choice: Choice = choose(trials({"threads 3": {"idle": 0.85, "loaded": 0.85}}), TRIED)
    lines = table_lines(replace(result(key_of(pi, plan)), choice=choice))
    assert lines[0].startswith("* threads 3: idle -15 % (")
    assert lines[1].startswith("  scheduling other: idle ")
    assert lines[-1].startswith("threads 3 wins; time of a request against the plan's: -15 % idle")
