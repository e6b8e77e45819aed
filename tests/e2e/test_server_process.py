"""The server as systemd runs it: a switch that drops no request, readiness, watchdog, whose app."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from demo.fleet import Fleet

from .conftest import FirstRollOut
from .support import (
    FAST,
    MODEL,
    MODEL_NAME,
    MODEL_PATH,
    REPO,
    CommandLine,
    Ssh,
    get,
    wait_ready,
    wait_until,
)

SYSTEMD = "/etc/systemd/system"
SCHED_BATCH = "3"  # sched(7)
UPSTREAM = "Upstream server tuned"
QUESTION = {
    "model": MODEL_NAME,
    "messages": [{"role": "user", "content": "Count up from one."}],
    "max_tokens": 12,
    "temperature": 0,
}


# --- a switch of releases -------------------------------------------------------------------------


@dataclass
class Load:
    """Clients that ask without a pause, each request on a connection of its own."""

    url: str
    faults: list[str] = field(default_factory=list)
    answers: int = 0

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(stream,)) for stream in (True, False) * 2
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(120)

    def _ask_on(self, stream: bool) -> None:
        while not self._over.is_set():
            try:
                fault = self._streamed() if stream else self._whole()
            except (httpx.HTTPError, ValueError, LookupError) as error:
                fault = f"{type(error).__name__}: {error}"
            if fault is None:
                self.answers += 1
            else:
                self.faults.append(fault)

    def _whole(self) -> str | None:
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=QUESTION, timeout=120)
        if answer.status_code != 200:
            return f"{answer.status_code}: {answer.text[:200]}"
        choice = answer.json()["choices"][0]
        return None if choice["message"]["content"] and choice["finish_reason"] else answer.text

    def _streamed(self) -> str | None:
        body = {**QUESTION, "stream": True}
        url = f"{self.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code}: {answer.read().decode()[:200]}"
            lines = [line for line in answer.iter_lines() if line]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        ended = any(c["choices"][0]["finish_reason"] for c in chunks)
        return None if lines[-1] == "data: [DONE]" and text and ended else f"cut: {lines[-3:]}"


@contextmanager
def load(fleet: Fleet, host: str) -> Iterator[Load]:
    found = Load(f"http://127.0.0.1:{fleet.host(host).http_port}")
    found.start()
    try:
        wait_until("answers", lambda: found.answers > 8)
        yield found
    finally:
        found.stop()


def test_switch_of_releases_drops_no_request(
    served: None, first: FirstRollOut, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-1"
    socket = "systemctl show edgellm.socket --property=InvocationID,ActiveEnterTimestampMonotonic"
    before = ssh(host, socket)
    with load(fleet, host) as asking:
        there = roll_out("--limit", host, *FAST, "--data", "max_tokens=300").assert_ok(host)
        release = there.host(host)["release"]
        assert ssh.running_release(host) == release != first.release(host)
        answers = asking.answers
        wait_until("answers of the new release", lambda: asking.answers > answers + 8)
        back = roll_out("--limit", host, deploy="rollback").assert_ok(host)
        assert back.host(host)["release"] == ssh.running_release(host) == first.release(host)
        answers = asking.answers
        wait_until("answers of the first release", lambda: asking.answers > answers + 8)
    assert asking.faults == []
    assert asking.answers > 40
    assert ssh(host, socket) == before  # the port was never closed


def test_another_port_is_listened_on_and_the_way_back_leads_to_the_first(
    served: None, first: FirstRollOut, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-2"
    roll_out("--limit", host, *FAST, "--data", "port=8123").assert_ok(host)
    assert listening(ssh, host) == {"127.0.0.1:8123"}
    roll_out("--limit", host, *FAST, "--data", "port=8123").assert_ok(host).assert_changed_nothing()
    roll_out("--limit", host, deploy="rollback").assert_ok(host)
    assert listening(ssh, host) == {"127.0.0.1:8000"}
    assert ssh.running_release(host) == first.release(host)
    roll_out("--limit", host, *FAST).assert_ok(host).assert_changed_nothing()


def test_port_that_another_program_has_is_told_and_the_release_before_serves_again(
    served: None, first: FirstRollOut, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-3"
    ssh(host, "systemd-run --unit=squatter python3 -m http.server --bind 127.0.0.1 8123")
    try:
        wait_until("the squatter", lambda: "127.0.0.1:8123" in listening(ssh, host))
        run = roll_out(
            *("--limit", host, *FAST, "--data", "port=8123", "--data", "load_deadline_s=10")
        )
        run.assert_bad(host, "failed", "not_ready")
        assert ssh.running_release(host) == first.release(host)
        assert "127.0.0.1:8000" in listening(ssh, host)
    finally:
        ssh(host, "systemctl stop squatter")


def listening(ssh: Ssh, host: str) -> set[str]:
    lines = [line for line in ssh(host, "ss -Hltnp").splitlines() if '"sshd"' not in line]
    return {line.split()[3] for line in lines}


# What a release was before systemd held the port
OLD_RELEASE = r"""set -e
cd /opt/edgellm/releases
cp -a "$(readlink -f ../current)" 0000000000000001
cd 0000000000000001
rm edgellm.socket
sed -i -e 's/^Type=notify/Type=exec/; s/edgellm.socket //' \
    -e '/^\(Requires\|Also\|Sockets\|WatchdogSec\|NotifyAccess\)=/d' edgellm.service
sed -i 's/-m edgellm_server$/-m uvicorn edgellm_server.app:app --port 8000/' entrypoint.sh
ln -sfn releases/0000000000000001 /opt/edgellm/previous
"""


def test_release_of_before_the_socket_can_be_rolled_back_to_and_replaced_again(
    served: None, first: FirstRollOut, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-2"
    ssh(host, OLD_RELEASE)
    roll_out("--limit", host, deploy="rollback").assert_ok(host)
    wait_ready(fleet, host)
    assert ssh.running_release(host) == "0000000000000001"
    left = ssh(
        host, f"ls {SYSTEMD} {SYSTEMD}/*.wants; systemctl list-units --all --plain 'edgellm*'"
    )
    assert "edgellm.socket" not in left
    assert listening(ssh, host) == {"127.0.0.1:8000"}
    roll_out("--limit", host, *FAST).assert_ok(host)
    assert ssh.running_release(host) == first.release(host)
    assert ssh(host, "systemctl is-active edgellm.socket; systemctl is-enabled edgellm.socket") == (
        "active\nenabled\n"
    )
    roll_out("--limit", host, *FAST).assert_ok(host).assert_changed_nothing()


# --- what systemd knows ---------------------------------------------------------------------------


def test_systemd_knows_when_the_model_is_ready(served: None, fleet: Fleet, ssh: Ssh) -> None:
    host = "edge-1"
    ssh(host, "systemctl restart edgellm")  # which waits for READY=1
    answer = get(fleet, host, "/health/ready")
    assert answer is not None
    assert answer.status_code == 200
    assert ssh.service(
        host, "Type", "NotifyAccess", "StatusText", "WatchdogUSec", "TimeoutStartUSec"
    ) == {
        "Type": "notify",
        "NotifyAccess": "all",
        "StatusText": f"serving {MODEL_NAME}",
        "WatchdogUSec": "1min",
        "TimeoutStartUSec": "infinity",
    }


# Starts it, and stops it in the middle of loading
HALTED = """systemctl stop edgellm; systemctl start --no-block edgellm
until pid=$(systemctl show edgellm --property=MainPID --value) &&
    tr '\\000' '\\n' 2>/dev/null </proc/$pid/environ | grep -q ^EDGELLM_RELEASE=
do sleep 0.02; done
kill -STOP $pid
systemctl show edgellm --property=ActiveState,MainPID"""


def test_service_that_still_loads_is_left_to_it(
    served: None, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-1"
    halted = ssh.values(host, HALTED)
    assert halted["ActiveState"] == "activating"
    with roll_out.start("--limit", host, *FAST) as started:
        wait_until("the smoke test", lambda: "operation: Verify" in started.output())
        ssh(host, f"kill -CONT {halted['MainPID']}")
        run = started.finish()
    run.assert_ok(host).assert_changed_nothing()
    assert ssh.main_pid(host) == int(halted["MainPID"])


def test_server_that_hangs_is_started_again_by_the_watchdog(
    served: None, first: FirstRollOut, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-1"
    folder = "/run/systemd/system/edgellm.service.d"
    ssh(host, f"mkdir -p {folder} && printf '[Service]\\nWatchdogSec=3\\n' >{folder}/test.conf")
    try:
        ssh(host, "systemctl daemon-reload && systemctl restart edgellm")
        restarts = int(ssh.service(host, "NRestarts")["NRestarts"])
        pid = ssh.main_pid(host)
        ssh(host, f"kill -STOP {pid}")
        wait_until("another process", lambda: ssh.main_pid(host) not in (0, pid))
        wait_ready(fleet, host)
        assert int(ssh.service(host, "NRestarts")["NRestarts"]) == restarts + 1
        assert "Watchdog timeout" in ssh(host, "journalctl --no-pager -u edgellm -n 100")
        assert ssh.running_release(host) == first.release(host)
    finally:
        ssh(host, f"rm -r {folder} && systemctl daemon-reload && systemctl restart edgellm")
    roll_out("--limit", host, *FAST).assert_ok(host).assert_changed_nothing()


def test_model_that_does_not_load_is_told_with_the_reason_and_rolled_back(
    served: None, first: FirstRollOut, roll_out: CommandLine, ssh: Ssh, tmp_path: Path
) -> None:
    host = "edge-1"
    broken = tmp_path / "broken.gguf"
    whole = REPO / ".cache" / "models" / Path(MODEL_PATH).name
    broken.write_bytes(whole.read_bytes()[:40_000_000])
    pin = model_pin(broken)
    run = roll_out("--limit", host, *FAST, inventory=roll_out.inventory("broken", [host], **pin))
    run.assert_bad(host, "failed", "load_failed")
    assert ssh.running_release(host) == first.release(host)


def model_pin(path: Path) -> dict[str, object]:
    content = path.read_bytes()
    return {
        "model_source": f"file:{path}",
        "model_sha256": hashlib.sha256(content).hexdigest(),
        "model_size_bytes": len(content),
    }


# --- whose app, whose engine ----------------------------------------------------------------------

OWN_APP = """
import asyncio
import json

from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from words import WORDS


async def health(request):
    return JSONResponse({"state": "ready"})


async def chat(request):
    async def events():
        for number, word in enumerate(WORDS):
            finish = "stop" if number == len(WORDS) - 1 else None
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": finish}
            yield f"data: {json.dumps({'choices': [choice]})}\\n\\n"
            await asyncio.sleep(0.02)
        yield "data: [DONE]\\n\\n"

    return StreamingResponse(events(), media_type="text/event-stream")


app = Starlette(
    routes=[Route("/health", health), Route("/v1/chat/completions", chat, methods=["POST"])]
)
"""


def test_own_app_is_sent_with_the_release_runs_as_ours_does_and_is_switched_back(
    served: None,
    first: FirstRollOut,
    fleet: Fleet,
    roll_out: CommandLine,
    ssh: Ssh,
    tmp_path: Path,
) -> None:
    host = "edge-2"
    (tmp_path / "main.py").write_text(OWN_APP)
    (tmp_path / "words.py").write_text('WORDS = ["my ", "own ", "words"]\n')
    settings = {"server_app": "main:app", "server_app_dir": str(tmp_path)}
    inventory = roll_out.inventory("own_app", [host], **settings)
    run = roll_out(*FAST, inventory=inventory).assert_ok(host)
    try:
        release = str(run.host(host)["release"])
        assert ssh.running_release(host) == release != first.release(host)
        assert run.host(host)["answer_sample"] == "my own words"
        assert ssh(host, f"cat /opt/edgellm/releases/{release}/app/main.py") == OWN_APP
        pid = ssh.main_pid(host)
        policy = ssh(host, f"sed 's/.*) //' /proc/{pid}/stat | cut -d' ' -f39").strip()
        assert policy == SCHED_BATCH
        assert ssh.service(host, "ActiveState", "User") == {
            "ActiveState": "active",
            "User": "edgellm",
        }
        roll_out(*FAST, inventory=inventory).assert_ok(host).assert_changed_nothing()
        (tmp_path / "words.py").write_text('WORDS = ["other ", "words"]\n')
        another = roll_out(*FAST, inventory=inventory).assert_ok(host)
        assert another.host(host)["release"] != release
        assert another.host(host)["answer_sample"] == "other words"
    finally:
        back = roll_out("--limit", host, *FAST)
    back.assert_ok(host)
    assert ssh.running_release(host) == first.release(host)


OPERATORS_UNIT = "operators-llm.service"
# An OpenAI-compatible server that the host has already: ours, from copies that are the operator's
OPERATORS_SERVER = f"""set -e
mkdir -p /srv/llm
cp -r "$(readlink -f /opt/edgellm/current/runtime)" /srv/llm/runtime
cp {MODEL_PATH} /srv/llm/model.gguf
cat >{SYSTEMD}/{OPERATORS_UNIT} <<'UNIT'
[Service]
ExecStart=/usr/bin/python3 -s -B -m edgellm_server
Environment=PYTHONPATH=/srv/llm/runtime EDGELLM_PORT=8081 EDGELLM_N_THREADS=1
Environment=EDGELLM_MODEL_PATH=/srv/llm/model.gguf EDGELLM_MODEL_NAME=theirs
UNIT
systemctl daemon-reload
systemctl start {OPERATORS_UNIT}
"""
DROP_IN = f"{SYSTEMD}/{OPERATORS_UNIT}.d/90-edgellm.conf"


def test_operators_own_server_is_tuned_asked_and_put_back(
    served: None, first: FirstRollOut, fleet: Fleet, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-1"
    ssh(host, OPERATORS_SERVER)
    inventory = roll_out.inventory(
        "forwarding",
        [host],
        engine="forward",
        upstream_url="http://127.0.0.1:8081/v1",
        upstream_unit=OPERATORS_UNIT,
        nofile=15000,
    )
    try:
        run = roll_out(*FAST, inventory=inventory).assert_ok(host)
        assert UPSTREAM in run.changed()[host]
        assert MODEL not in run.changed()[host]
        release = run.host(host)["release"]
        files = ssh(host, f"ls /opt/edgellm/releases/{release}").split()
        assert "model.gguf" not in files
        assert process_of(ssh, host, OPERATORS_UNIT) == {
            "policy": SCHED_BATCH,
            "cgroup": f"0::/edgellm.slice/{OPERATORS_UNIT}",
            "nofile": "15000",
        }
        with load(fleet, host) as asking:
            pass
        assert asking.faults == []
        roll_out(*FAST, inventory=inventory).assert_ok(host).assert_changed_nothing()
        roll_out("--limit", host, deploy="rollback").assert_ok(host)
        assert ssh.running_release(host) == first.release(host)
        assert ssh(host, f"ls {DROP_IN} 2>&1", check=False).count("No such file") == 1
        wait_until(
            "the operator's server outside of our slice",
            lambda: (
                process_of(ssh, host, OPERATORS_UNIT).get("cgroup")
                == f"0::/system.slice/{OPERATORS_UNIT}"
            ),
        )
    finally:
        ssh(host, f"systemctl stop {OPERATORS_UNIT}; rm -rf {SYSTEMD}/{OPERATORS_UNIT}* /srv/llm")
        ssh(host, "systemctl daemon-reload")
        back = roll_out("--limit", host, *FAST)
    back.assert_ok(host)


def test_upstream_unit_that_is_not_there_fails_the_host_before_it_is_touched(
    served: None, first: FirstRollOut, roll_out: CommandLine, ssh: Ssh
) -> None:
    host = "edge-3"
    settings = {"engine": "forward", "upstream_url": "http://127.0.0.1:8081/v1"}
    inventory = roll_out.inventory("nowhere", [host], **settings, upstream_unit="none.service")
    pid = ssh.main_pid(host)
    run = roll_out(*FAST, inventory=inventory)
    run.assert_bad(host, "failed", "upstream_unit", "none.service", "no unit of that name")
    assert run.changed() == {host: []}
    assert ssh.main_pid(host) == pid
    assert ssh.current_release(host) == first.release(host)


def process_of(ssh: Ssh, host: str, unit: str) -> dict[str, str]:
    return ssh.values(
        host,
        f"""pid=$(systemctl show {unit} --property=MainPID --value)
        echo policy=$(sed 's/.*) //' /proc/$pid/stat | cut -d' ' -f39)
        echo cgroup=$(grep ^0:: /proc/$pid/cgroup)
        echo nofile=$(grep 'open files' /proc/$pid/limits | tr -s ' ' | cut -d' ' -f4)""",
    )
