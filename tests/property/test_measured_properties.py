"""Noise makes no winner, a true gain does, and no text on a host breaks a run."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as run_with
from hypothesis import strategies as st

from edgellm.hardware import HostProfile
from edgellm.measured import (
    PLANNED,
    Candidate,
    Choice,
    MeasuredResult,
    Trial,
    apply_measured,
    candidates,
    changed_plan,
    choose,
    result_key,
)
from edgellm.parse import parse_profile
from edgellm.settings import Settings
from edgellm.tuning import plan_tuning, visible_cpus
from edgellm_server.trial import turn_order

HARDWARE = Path(__file__).parents[1] / "hardware"
BOARDS = tuple(
    parse_profile(path.read_text(encoding="ascii"), control_time_s=None)
    for path in sorted(HARDWARE.glob("*/probe.txt"))
)
SETTINGS = Settings.from_host_data(
    {
        "model_name": "qwen2.5-0.5b-instruct",
        "model_source": "file:/model.gguf",
        "model_sha256": "0" * 64,
        "model_size_bytes": 428_730_208,
    },
    host="edge-01",
)
CONDITIONS = ("idle", "crowded", "loaded")
TRIED = (Candidate.of(PLANNED), *(Candidate.of(f"c{n}", threads=n) for n in range(1, 8)))


@dataclass(frozen=True)
class Noise:
    """How a host's times scatter: in relative terms, one standard deviation of their logarithm."""

    spread: float
    rounds: int
    outliers: float = 0.0  # this share of times is up to three times as long
    drift: float = 0.0  # a round takes this much longer than the one before

    def trials(self, rng: random.Random, factors: dict[str, float]) -> list[Trial]:
        found = []
        for number in range(self.rounds):
            order = turn_order([c.name for c in TRIED], number)
            for place, name in enumerate(order):
                for condition in CONDITIONS:
                    factor = math.exp(rng.gauss(0, self.spread)) * factors.get(name, 1.0)
                    factor *= 1 + self.drift * (number + place / len(order))
                    if rng.random() < self.outliers:
                        factor *= rng.uniform(1, 3)
                    found.append(
                        Trial(
                            candidate=name,
                            round=number,
                            condition=condition,
                            ttft_ms=100 * factor,
                            tpot_ms=20 * factor,
                        )
                    )
        return found

    def choice(self, rng: random.Random, factors: dict[str, float]) -> Choice:
        return choose(self.trials(rng, factors), TRIED)


@pytest.mark.parametrize(
    "noise",
    [
        Noise(spread=0.02, rounds=5),
        Noise(spread=0.1, rounds=5),
        Noise(spread=0.3, rounds=12),
        Noise(spread=0.05, rounds=8),
        Noise(spread=0.03, rounds=5, outliers=0.1),
        Noise(spread=0.03, rounds=6, drift=0.05),
    ],
    ids=str,
)
def test_noise_alone_keeps_the_plan_in_19_of_20_runs(noise: Noise) -> None:
    rng = random.Random(20261202)
    runs = 200
    kept = sum(noise.choice(rng, {}).keeps_the_plan for _ in range(runs))
    assert kept >= 0.95 * runs


@pytest.mark.parametrize(
    "noise",
    [Noise(spread=0.03, rounds=5), Noise(spread=0.05, rounds=8), Noise(spread=0.08, rounds=12)],
    ids=str,
)
def test_a_true_gain_of_15_percent_is_found(noise: Noise) -> None:
    rng = random.Random(20261202)
    runs = 100
    found = sum(noise.choice(rng, {"c3": 0.85}).candidate == "c3" for _ in range(runs))
    assert found >= 0.95 * runs


def test_a_gain_under_one_condition_never_wins_at_the_price_of_another() -> None:
    rng = random.Random(20261202)
    for _ in range(50):
        trials = [
            replace(t, ttft_ms=t.ttft_ms * 1.15, tpot_ms=t.tpot_ms * 1.15)
            if t.candidate == "c3" and t.condition == "loaded"
            else t
            for t in Noise(spread=0.02, rounds=8).trials(rng, {})
        ]
        fast = [
            replace(t, ttft_ms=t.ttft_ms * 0.8, tpot_ms=t.tpot_ms * 0.8)
            if t.candidate == "c3" and t.condition == "idle"
            else t
            for t in trials
        ]
        assert choose(fast, TRIED).candidate != "c3"


times = st.floats(min_value=0.01, max_value=1e6)
trial_lists = st.lists(
    st.builds(
        Trial,
        candidate=st.sampled_from([c.name for c in TRIED]),
        round=st.integers(min_value=0, max_value=12),
        condition=st.sampled_from(CONDITIONS),
        ttft_ms=times,
        tpot_ms=times,
        throttled=st.sampled_from([False, False, False, True]),
        disturbed=st.booleans(),
    ),
    max_size=60,
)


@given(trial_lists)
def test_any_trials_make_a_choice_among_the_candidates_that_can_be_stored(
    trials: list[Trial],
) -> None:
    choice = choose(trials, TRIED)
    chosen = next(c for c in TRIED if c.name == choice.candidate)
    assert choice.changes == chosen.changes
    profile = BOARDS[0]
    plan = plan_tuning(profile, SETTINGS)
    key = result_key(profile, model_sha256="0" * 64, runtime_id="r", plan=plan)
    stored = MeasuredResult(
        key=key, choice=choice, measured_on="2026-12-02", duration_s=1.0, ended="rounds"
    )
    assert MeasuredResult.parse(stored.to_json_text()) == stored


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner),
    max_leaves=20,
)


@given(st.text(max_size=200) | json_values.map(json.dumps))
def test_any_text_on_a_host_leaves_the_plan_or_is_a_result(text: str) -> None:
    profile = replace(BOARDS[0], measured_json=text)
    plan = plan_tuning(profile, SETTINGS)
    key = result_key(profile, model_sha256="0" * 64, runtime_id="r", plan=plan)
    tuned, said = apply_measured(plan, profile, key)
    assert said is not None
    assert replace(tuned, reasons=()) == replace(plan, reasons=())


@st.composite
def damaged_results(draw: st.DrawFn) -> str:
    """A sound result with one of its values replaced by anything."""
    profile = BOARDS[0]
    plan = plan_tuning(profile, SETTINGS)
    key = result_key(profile, model_sha256="0" * 64, runtime_id="r", plan=plan)
    choice = Noise(spread=0.01, rounds=5).choice(random.Random(1), {"c3": 0.5})
    stored = MeasuredResult(
        key=key, choice=choice, measured_on="2026-12-02", duration_s=1.0, ended="rounds"
    )
    values = json.loads(stored.to_json_text())
    parts = [values, values["key"], values["choice"], values["choice"]["standings"][0]]
    part = draw(st.sampled_from(parts))
    part[draw(st.sampled_from(sorted(part)))] = draw(json_values)
    return json.dumps(values)


@given(damaged_results())
@run_with(max_examples=200)
def test_damaged_result_never_raises_and_never_leaves_the_hosts_cpus(text: str) -> None:
    profile = replace(BOARDS[0], measured_json=text)
    plan = plan_tuning(profile, SETTINGS)
    key = result_key(profile, model_sha256="0" * 64, runtime_id="r", plan=plan)
    tuned, _ = apply_measured(plan, profile, key)
    assert not tuned.cpus - visible_cpus(profile)


@given(st.sampled_from(BOARDS), st.integers(min_value=1, max_value=3))
def test_every_candidate_is_a_plan_within_the_hosts_cpus_and_quota(
    profile: HostProfile, n_parallel: int
) -> None:
    settings = replace(SETTINGS, n_parallel=n_parallel)
    plan = plan_tuning(profile, settings)
    tried = candidates(plan, profile, settings)
    assert tried[0].changes == ()
    assert len({c.name for c in tried}) == len(tried) <= 8
    for candidate in tried[1:]:
        changed = changed_plan(plan, profile, candidate.changes)
        assert changed != plan
        assert not changed.cpus - visible_cpus(profile)
        quota = profile.cgroup.quota_cpus
        most = min(len(part) for part in changed.worker_cpus)
        most = most if quota is None else min(most, max(1, int(quota)))
        assert 1 <= changed.engine.n_threads <= max(most, plan.engine.n_threads)
        # What the roll-out must not lose by a measured choice
        assert changed.limits == plan.limits
        assert changed.numa == plan.numa
        assert changed.workers == plan.workers
