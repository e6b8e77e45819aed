"""Short trials of several ways to run the server, in turns, on the host itself.

    python3 -m edgellm_server.trial <job.json           one JSON line an event
    python3 -m edgellm_server.trial clean-up            what a killed run left behind

Each trial is a server process of its own: started as a release starts it (the job brings each
candidate's own entrypoint.sh, server.env and slice), warmed, asked by probe.py's stopwatch, ended.
In a round every candidate has its turn, and who begins changes with each round, so that what slows
the host slows all of them. Which one wins is not decided here (edgellm/measured.py).

Standard library only. deploys/tune.py runs it as a systemd unit whose ExecStopPost= is `clean-up`:
however it ends, nothing of it stays, and a service that it stopped is started again.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgellm_server.probe import (
    Options,
    ProbeError,
    Stream,
    ask,
    host_state,
    prompt_for,
    wait_until_ready,
)

Say = Callable[[dict[str, Any]], None]

# Fewer pairs than this tell nothing about their own spread (edgellm/measured.py wants as many).
MIN_ROUNDS = 5
# After this many rounds a candidate that was faster nowhere, or far slower somewhere, is let go.
JUDGED_FROM_ROUND = 2
FAR_SLOWER = 1.2
TOKENS = 25  # the first, and 24 after it
LONG_TOKENS = 2
# The short request comes while the long prompt's first batch is being read.
CROWD_HEAD_START_S = 0.05
SETTLE_S = 0.5  # until the scheduler has spread the neighbours over the cores
SAMPLE_EVERY_S = 0.5
BUSY_SAMPLES = 6
HEAT_MARGIN_C = 5.0
# Clocks wander by a few percent; a board that protects itself goes down by a step.
CLOCK_KEPT = 0.85
THROTTLED_NOW = 0xF  # of the Raspberry Pi's flags; the upper ones are history
END_WITHIN_S = 15.0
MOST_FAILURES = 2  # of one candidate
ESTIMATE_SLACK = 1.2

SERVICE_UNITS = ("edgellm.socket", "edgellm.service")
# No "-" in the slices' names: that would put them below edgellm.slice, and weights compete among
# siblings.
SLICE = "edgellm_trial{index}.slice"
SLICE_FILES = "/run/systemd/system/edgellm_trial*.slice"
OWN_SLICE = "edgellm_tune.slice"  # the stopwatch's: see edgellm/trial_job.py
SCOPES = ("edgellm-trial-*.scope", "edgellm-neighbour-*.scope")

# Behind a nonce, so that none of it is a cached prefix: three batches of 64 tokens, about.
LONG_TEXT = (
    "The lighthouse stood at the end of a long wall of grey stone, and every evening at dusk the "
    "keeper climbed its two hundred steps to trim the lamp. From the gallery he could see the "
    "fishing boats come home, one after another, their lanterns small and yellow on the dark "
    "water. He wrote down the weather, the height of the tide and the name of every ship that "
    "passed, as his father had done before him, and his father's father before that. On clear "
    "nights the islands in the north looked close enough to touch; in fog the horn sounded twice "
    "a minute until morning. Nobody in the village could remember a night when the light had "
    "failed, and nobody wished to be the first. Sum this up in one sentence."
)
# Ends with its parent, however that ends, and at its own deadline.
NEIGHBOUR = (
    "import os, time\n"
    "parent, end = os.getppid(), time.monotonic() + 600\n"
    "while os.getppid() == parent and time.monotonic() < end:\n"
    "    for _ in range(100000): pass\n"
)


@dataclass(frozen=True)
class Candidate:
    """One way to run the server, as rendered for a release of its own."""

    name: str
    entrypoint: str
    environ: Mapping[str, str]
    slice_text: str | None  # None: no slice of its own, system.slice


@dataclass(frozen=True)
class Job:
    """`candidates`: the first is the one that the others are measured against."""

    candidates: tuple[Candidate, ...]
    conditions: tuple[str, ...]  # of "idle", "crowded", "loaded"
    model_name: str
    runtime: str  # the directory that a release's `runtime` links to
    system_prompt: str | None
    budget_s: float
    max_rounds: int
    requests: int
    neighbours: int
    hot_c: float
    load_deadline_s: float
    first_token_deadline_s: float
    request_deadline_s: float
    live_url: str | None  # of the service that is there already
    stop_service: bool
    while_busy: bool
    api_key_file: str | None
    user: str | None
    systemd: bool  # False: plain processes, where there is no systemd to place them
    keep_all: bool = False  # every candidate to the end, also one that cannot win any more

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        candidates = tuple(Candidate(**item) for item in values.pop("candidates"))
        conditions = tuple(values.pop("conditions"))
        return cls(candidates=candidates, conditions=conditions, **values)

    @property
    def baseline(self) -> str:
        return self.candidates[0].name


class TrialError(Exception):
    """A trial has no figures; the message says why."""


class StopError(Exception):
    """No further trial: `why` is a word for programs, `detail` a sentence."""

    def __init__(self, why: str, detail: str) -> None:
        super().__init__(detail)
        self.why, self.detail = why, detail


@dataclass
class Figures:
    """One candidate, one round, one condition. Times are means over its requests."""

    candidate: str
    round: int
    condition: str
    ttft_ms: float
    tpot_ms: float
    n: int
    temperature_c: float | None
    cpu_freq_khz: int | None
    why_throttled: str | None
    disturbed: bool  # somebody was served by the live service meanwhile

    @property
    def request_ms(self) -> float:
        return self.ttft_ms + (TOKENS - 1) * self.tpot_ms


# Pure


def log_ratios(figures: Sequence[Figures], baseline: str) -> dict[str, dict[str, list[float]]]:
    """Candidate -> condition -> log(its time / the baseline's) of each round that has both."""
    times = {(f.round, f.condition, f.candidate): f.request_ms for f in figures if not f.disturbed}
    ratios: dict[str, dict[str, list[float]]] = {}
    for (number, condition, name), value in times.items():
        base = times.get((number, condition, baseline))
        if base is not None and name != baseline:
            ratios.setdefault(name, {}).setdefault(condition, []).append(math.log(value / base))
    return ratios


def worth_another_round(
    names: Sequence[str],
    figures: Sequence[Figures],
    *,
    baseline: str,
    rounds_done: int,
    turn_s: float,
    left_s: float,
) -> tuple[str, ...]:
    """Those of `names` that may still win, no more than the time left can measure often enough.

    Letting one go can only keep it from winning: it makes no false winner likelier.
    """
    rest = [name for name in names if name != baseline]
    best = dict.fromkeys(rest, 0.0)  # also of those that nothing is known of yet
    for name, by_condition in log_ratios(figures, baseline).items():
        means = [sum(values) / len(values) for values in by_condition.values()]
        hopeless = min(means) >= 0 or max(means) > math.log(FAR_SLOWER)
        if name in best and rounds_done >= JUDGED_FROM_ROUND and hopeless:
            rest.remove(name)
        best[name] = min(means)
    missing_rounds = MIN_ROUNDS - rounds_done
    if missing_rounds > 0:
        affordable = int(left_s / (missing_rounds * turn_s)) - 1  # the baseline's turn is one
        rest = sorted(rest, key=lambda name: best[name])[: max(0, affordable)]
    return tuple(name for name in names if name == baseline or name in rest)


def turn_order(names: Sequence[str], number: int) -> tuple[str, ...]:
    """Every other round runs backwards, and after it another one begins: what slowly gets slower
    while it is measured is not taken for those who come late."""
    first = number // 2 % len(names)
    order = (*names[first:], *names[:first])
    return order[::-1] if number % 2 else order


def throttle_reason(
    *, flags: str | None, temperature_c: float | None, hot_c: float, clocks_khz: tuple[Any, Any]
) -> str | None:
    """Why a trial says nothing of the knobs any more; `clocks_khz`: (first round's, now)."""
    first, now = clocks_khz
    if flags is not None and int(flags, 16) & THROTTLED_NOW:
        return f"the firmware says {flags}: it holds the clock down"
    if temperature_c is not None and temperature_c >= hot_c:
        return f"{temperature_c:.0f} C, and from {hot_c:.0f} C on the clock may go down"
    if first is not None and now is not None and now < CLOCK_KEPT * first:
        return f"the clock fell from {first // 1000} to {now // 1000} MHz"
    return None


def counters(exposition: str, *names: str) -> float:
    """The sum of all samples of these metrics in Prometheus' text format."""
    total = 0.0
    for line in exposition.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in names:
            total += float(line.rpartition(" ")[2])
    return total


# The host


def heat_limit_c(hot_c: float) -> float:
    """Below where the kernel begins to slow down, and never above `hot_c`."""
    limits = [hot_c]
    for path in glob.glob("/sys/class/thermal/thermal_zone*/trip_point_*_type"):
        with contextlib.suppress(OSError, ValueError):
            if Path(path).read_text().strip() in ("passive", "hot", "critical"):
                trip_c = int(Path(path.removesuffix("type") + "temp").read_text()) / 1000
                if 50 < trip_c < 150:  # sensors without a limit say 0, or less
                    limits.append(trip_c - HEAT_MARGIN_C)
    return min(limits)


@dataclass
class Watch:
    """The highest clock and temperature while requests run; throttling flags if ever set."""

    temperature_c: float | None = None
    cpu_freq_khz: int | None = None
    flags: str | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        thread = threading.Thread(target=self._sample, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()

    def _sample(self) -> None:
        while True:
            now = host_state()
            self.temperature_c = _higher(self.temperature_c, now["temperature_c"])
            self.cpu_freq_khz = _higher(self.cpu_freq_khz, now["cpu_freq_khz"])
            if now["throttled"] and int(now["throttled"], 16) & THROTTLED_NOW:
                self.flags = now["throttled"]
            if self._over.wait(SAMPLE_EVERY_S):
                return


def _higher(known: Any, new: Any) -> Any:
    return new if known is None or (new is not None and new > known) else known


def live_metrics(url: str | None) -> str | None:
    """What the live service says of itself; None: there is none, or it does not answer."""
    if url is None:
        return None
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except (OSError, ValueError):
        return None


def served_so_far(url: str | None) -> float:
    return counters(live_metrics(url) or "", "edgellm_requests_total", "edgellm_rejected_total")


def refuse_if_busy(url: str | None) -> None:
    for _ in range(BUSY_SAMPLES):
        active = counters(live_metrics(url) or "", "edgellm_slots_busy", "edgellm_queue_depth")
        if active:
            raise StopError("busy", f"the live service has {active:.0f} requests at work")
        time.sleep(SAMPLE_EVERY_S)


def systemctl(*arguments: str) -> None:
    subprocess.run(
        ["systemctl", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )


def work_directory() -> Path:
    """RuntimeDirectory= of our unit, which systemd removes with it; else a temporary one."""
    given = os.environ.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return Path(given or tempfile.mkdtemp(prefix="edgellm-trial-"))


def stop_live_service(work: Path) -> bool:
    """The socket as well, or the next connection would start it again. False: it was not running.

    Neither is disabled: also a host that is switched off meanwhile comes back with both.
    """
    asked = ["systemctl", "is-active", "edgellm.service"]
    state = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if state.stdout.strip() not in (b"active", b"activating", b"reloading"):
        return False
    (work / "service-stopped").touch()  # before it is, or nobody would know
    systemctl("stop", *SERVICE_UNITS)
    return True


def clean_up(work: Path, say: Say) -> None:
    """Whatever is left of a run. Also when there is nothing: it may have been done already."""
    systemctl("stop", *SCOPES)
    files = [Path(path) for path in glob.glob(SLICE_FILES)]
    if files:
        systemctl("stop", *(file.name for file in files))
        for file in files:
            file.unlink(missing_ok=True)
        systemctl("daemon-reload")
    stopped = work / "service-stopped"
    if stopped.exists():
        systemctl("start", "--no-block", *SERVICE_UNITS)
        stopped.unlink()
        say({"event": "service", "state": "started again"})


# One trial


class Bench:
    """Starts servers, one at a time, and asks them."""

    def __init__(self, job: Job, work: Path) -> None:
        self.job, self.work = job, work
        self._api_key = None
        if job.api_key_file is not None:
            self._api_key = Path(job.api_key_file).read_text(encoding="ascii").strip()
        self.hot_c = heat_limit_c(job.hot_c)
        self._first_clock_khz: dict[tuple[str, str], int | None] = {}

    def prepare(self) -> None:
        """A release of its own for each candidate, and its slice."""
        for index, candidate in enumerate(self.job.candidates):
            home = self._home(candidate)
            home.mkdir()
            (home / "entrypoint.sh").write_text(candidate.entrypoint)
            (home / "runtime").symlink_to(self.job.runtime)
            if self.job.system_prompt is not None:
                (home / "system_prompt.txt").write_text(self.job.system_prompt, encoding="utf-8")
            locks = home / "run"
            locks.mkdir(mode=0o700)
            if self.job.user is not None:
                shutil.chown(locks, self.job.user, self.job.user)
            if self.job.systemd and candidate.slice_text is not None:
                path = Path(os.path.dirname(SLICE_FILES), SLICE.format(index=index))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(candidate.slice_text)
        if self.job.systemd:
            systemctl("daemon-reload")

    def _home(self, candidate: Candidate) -> Path:
        return self.work / f"release-{self.job.candidates.index(candidate)}"

    def turn(self, candidate: Candidate, number: int) -> Iterator[Figures]:
        """One server process, asked under each condition in turn. Raises TrialError."""
        log = self.work / "server.log"
        port = free_port()
        options = Options(
            url=f"http://127.0.0.1:{port}",
            model=self.job.model_name,
            max_tokens=TOKENS,
            load_deadline_s=self.job.load_deadline_s,
            first_token_deadline_s=self.job.first_token_deadline_s,
            stall_deadline_s=self.job.first_token_deadline_s,
            request_deadline_s=self.job.request_deadline_s,
            api_key=self._api_key,
        )
        try:
            with self._server(candidate, port, log) as process:
                self._wait(process, options)
                ask(options, prompt_for(0, secrets.token_hex(4)))
                for condition in self.job.conditions:
                    yield self._figures(candidate, number, condition, options)
        except ProbeError as error:
            said = log.read_text(errors="replace").splitlines()[-1:] if log.exists() else []
            tail = f"; its log ends: {said[0][:300]}" if said else ""
            raise TrialError(f"{error.kind}: {error.detail}{tail}") from None

    def _wait(self, process: subprocess.Popen[bytes], options: Options) -> None:
        """As wait_until_ready, and not to the deadline for a process that has ended."""
        ends_at = time.monotonic() + options.load_deadline_s
        while True:
            left_s = ends_at - time.monotonic()
            try:
                wait_until_ready(replace(options, load_deadline_s=max(0.1, min(2.0, left_s))))
                return
            except ProbeError as error:
                if process.poll() is not None:
                    ended = f"the server ended with {process.returncode}"
                    raise ProbeError("not_ready", ended) from None
                if error.kind != "not_ready" or left_s <= 0:
                    raise

    def _figures(
        self, candidate: Candidate, number: int, condition: str, options: Options
    ) -> Figures:
        served = served_so_far(self.job.live_url)
        watch = Watch()
        with contextlib.ExitStack() as stack:
            if condition == "loaded":
                stack.enter_context(self._busy_neighbours())
            stack.enter_context(watch.watching())
            ask_one = ask_in_a_crowd if condition == "crowded" else ask
            streams = [
                ask_one(options, prompt)
                for prompt in prompts(self.job.requests, with_long=condition != "crowded")
            ]
        ttft_ms = [stream.ttft_ms for stream in streams]
        tpot_ms = [stream.tpot_ms for stream in streams if stream.tpot_ms is not None]
        if not tpot_ms:
            raise TrialError("answers of one token: nothing to time")
        key = (candidate.name, condition)
        first = self._first_clock_khz.setdefault(key, watch.cpu_freq_khz)
        return Figures(
            candidate=candidate.name,
            round=number,
            condition=condition,
            ttft_ms=sum(ttft_ms) / len(ttft_ms),
            tpot_ms=sum(tpot_ms) / len(tpot_ms),
            n=len(streams),
            temperature_c=watch.temperature_c,
            cpu_freq_khz=watch.cpu_freq_khz,
            why_throttled=throttle_reason(
                flags=watch.flags,
                temperature_c=watch.temperature_c,
                hot_c=self.hot_c,
                clocks_khz=(first, watch.cpu_freq_khz),
            ),
            disturbed=not self.job.while_busy and served_so_far(self.job.live_url) != served,
        )

    @contextlib.contextmanager
    def _server(
        self, candidate: Candidate, port: int, log: Path
    ) -> Iterator[subprocess.Popen[bytes]]:
        home = self._home(candidate)
        environ = {
            "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            **candidate.environ,
            "EDGELLM_HOST": "127.0.0.1",
            "EDGELLM_PORT": str(port),
            "EDGELLM_DRAIN_DEADLINE_S": "1",
            "RUNTIME_DIRECTORY": str(home / "run"),
        }
        if self.job.system_prompt is not None:
            environ["EDGELLM_SYSTEM_PROMPT_FILE"] = str(home / "system_prompt.txt")
        command = ["sh", str(home / "entrypoint.sh")]
        if self.job.systemd:
            index = self.job.candidates.index(candidate)
            placed = "system.slice" if candidate.slice_text is None else SLICE.format(index=index)
            account = [] if self.job.user is None else self._account()
            command = [*scope(f"edgellm-trial-{os.getpid()}-{port}", placed), *account, *command]
        with log.open("wb") as output, running(command, environ, output) as process:
            yield process

    def _account(self) -> list[str]:
        entry = pwd.getpwnam(str(self.job.user))
        return [f"--uid={entry.pw_uid}", f"--gid={entry.pw_gid}", "--"]

    @contextlib.contextmanager
    def _busy_neighbours(self) -> Iterator[None]:
        """Processes that compute for ever, as any service of the host might, one a CPU."""
        with contextlib.ExitStack() as started:
            for number in range(self.job.neighbours):
                command = [sys.executable, "-I", "-S", "-c", NEIGHBOUR]
                if self.job.systemd:
                    name = f"edgellm-neighbour-{os.getpid()}-{number}-{secrets.token_hex(4)}"
                    command = [*scope(name, "system.slice"), "--", *command]
                started.enter_context(running(command, dict(os.environ), None))
            time.sleep(SETTLE_S)
            yield


def scope(name: str, slice_name: str) -> list[str]:
    """systemd-run's words for a process of ours in a cgroup of its own; it execs the command."""
    return [
        *("systemd-run", "--scope", "--quiet", "--collect"),
        *(f"--unit={name}.scope", f"--slice={slice_name}"),
    ]


@contextlib.contextmanager
def running(
    command: Sequence[str], environ: Mapping[str, str], output: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a session of its own, ended by its own process id, come what may."""
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=output or subprocess.DEVNULL,
        stderr=output or subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def prompts(count: int, *, with_long: bool) -> list[str]:
    """The same questions in every trial, each behind a nonce of its own; the last one is long."""
    asked = [prompt_for(number, secrets.token_hex(4)) for number in range(1, count + 1)]
    if with_long and count > 1:
        asked[-1] = long_prompt()
    return asked


def long_prompt() -> str:
    return f"[{secrets.token_hex(4)}] {LONG_TEXT}"


def ask_in_a_crowd(options: Options, prompt: str) -> Stream:
    """A short request that comes while the server reads somebody else's long prompt."""
    other: list[ProbeError] = []

    def ask_long() -> None:
        try:
            ask(replace(options, max_tokens=LONG_TOKENS), long_prompt())
        except ProbeError as error:
            other.append(error)

    thread = threading.Thread(target=ask_long)
    thread.start()
    try:
        time.sleep(CROWD_HEAD_START_S)
        stream = ask(options, prompt)
    finally:
        thread.join()
    if other:
        raise other[0]
    return stream


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# All of it


def run(job: Job, bench: Bench, say: Say) -> None:
    """Rounds of turns until something says stop. Raises StopError, always."""
    began = time.monotonic()
    ends_at = began + job.budget_s
    by_name = {candidate.name: candidate for candidate in job.candidates}
    names = tuple(by_name)
    figures: list[Figures] = []
    failures: dict[str, int] = {}
    turns_s: dict[str, list[float]] = {}

    for number in range(job.max_rounds):
        for name in turn_order(names, number):
            left_s = ends_at - time.monotonic()
            known_s = turns_s.get(name) or [max(s) for s in turns_s.values()]
            if left_s < ESTIMATE_SLACK * max(known_s, default=0.0) or left_s <= 0:
                raise StopError("budget", f"the {job.budget_s:.0f} s are used up")
            turn_began = time.monotonic()
            try:
                for found in bench.turn(by_name[name], number):
                    figures.append(found)
                    say(_trial_event(found, ends_at - time.monotonic()))
                    if found.why_throttled is not None:
                        raise StopError("throttled", found.why_throttled)
            except TrialError as error:
                failures[name] = failures.get(name, 0) + 1
                say({"event": "failed", "candidate": name, "round": number, "why": str(error)})
                if name == job.baseline and failures[name] >= MOST_FAILURES:
                    raise StopError("failed", f"{name} itself: {error}") from None
                continue
            turns_s.setdefault(name, []).append(time.monotonic() - turn_began)
        if not turns_s:
            continue
        turn_s = sum(map(sum, turns_s.values())) / sum(map(len, turns_s.values()))
        able = tuple(name for name in names if failures.get(name, 0) < MOST_FAILURES)
        kept = able
        if not job.keep_all:
            kept = worth_another_round(
                able,
                figures,
                baseline=job.baseline,
                rounds_done=number + 1,
                turn_s=turn_s,
                left_s=ends_at - time.monotonic(),
            )
        for name in names:
            if name not in kept:
                say({"event": "dropped", "candidate": name, "round": number})
        names = kept
        if len(names) == 1:
            left_s = ends_at - time.monotonic()
            needed_s = (MIN_ROUNDS - number - 1) * 2 * turn_s
            if needed_s > left_s:
                detail = (
                    f"{MIN_ROUNDS} rounds of two need {needed_s:.0f} s more, {left_s:.0f} are left"
                )
                raise StopError("budget", detail)
            raise StopError("settled", f"after {number + 1} rounds nothing is left that could win")
    raise StopError("rounds", f"{job.max_rounds} rounds are done")


def _trial_event(found: Figures, left_s: float) -> dict[str, Any]:
    return {
        "event": "trial",
        "candidate": found.candidate,
        "round": found.round,
        "condition": found.condition,
        "ttft_ms": round(found.ttft_ms, 2),
        "tpot_ms": round(found.tpot_ms, 3),
        "n": found.n,
        "temperature_c": found.temperature_c,
        "cpu_freq_khz": found.cpu_freq_khz,
        "throttled": found.why_throttled is not None,
        "disturbed": found.disturbed,
        "left_s": round(max(0.0, left_s)),
    }


def say_on_stdout(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


def main(arguments: Sequence[str]) -> int:
    work = work_directory()
    if list(arguments) == ["clean-up"]:
        clean_up(work, lambda event: None)
        # It stays with nothing in it until somebody stops it; this very process is still in it
        systemctl("stop", "--no-block", OWN_SLICE)
        return 0
    job = Job.from_json(sys.stdin.read())
    # Both end the run by its own `finally`; systemd sends the first
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    began = time.monotonic()
    why, detail = "failed", "ended by a fault of its own"
    try:
        if not job.while_busy:
            refuse_if_busy(job.live_url)
        if job.stop_service and stop_live_service(work):
            say_on_stdout({"event": "service", "state": "stopped"})
        bench = Bench(job, work)
        bench.prepare()
        run(job, bench, say_on_stdout)
    except StopError as stop:
        why, detail = stop.why, stop.detail
    except (OSError, LookupError) as error:
        why, detail = "failed", f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more
            if job.systemd:
                clean_up(work, say_on_stdout)
            else:
                shutil.rmtree(work, ignore_errors=True)
            say_on_stdout(
                {
                    "event": "end",
                    "why": why,
                    "detail": detail,
                    "duration_s": round(time.monotonic() - began, 1),
                }
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
