"""All files of reports/<run>/: complete and readable whatever the run was like."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edgellm import report_files, reports
from edgellm.report import Fault, FleetReport, HostRecord, HostStatus, exit_code
from edgellm.reports import history, html, prometheus, retry, schema

REPO = Path(__file__).parents[2]
SCHEMA = REPO / "docs" / "fleet.schema.json"
HOSTILE = '</script><script>alert(1)</script>"\\\n\x00\ud800'


def host(name: str, status: HostStatus = HostStatus.OK, reason: str | None = None) -> HostRecord:
    return HostRecord(
        name=name,
        address="192.0.2.7",
        groups=("factory", "site_hall_a"),
        status=status,
        reason=reason,
        release=None,
        changed=(),
        smoke=None,
        plan=None,
    )


def report(*hosts: HostRecord) -> FleetReport:
    return FleetReport(
        run_id="20261202T101500Z-1a2b",
        started_at="2026-12-02T10:15:00+00:00",
        ended_at="2026-12-02T10:16:00+00:00",
        command="qwen",
        model_name="m",
        model_sha256="a" * 64,
        hosts=hosts,
        invocation=("pyinfra", "-y", "inventories/factory.py", "deploys/qwen.py"),
    )


def of_every_status() -> FleetReport:
    return report(*(host(f"h-{status.value}", status, HOSTILE) for status in HostStatus))


def past(at: str, ms: float, kernel: str = "6.6") -> str:
    fields = {"run_id": at, "at": at, "host": "h-ok", "status": "ok", "kernel": kernel}
    return json.dumps({**fields, "median_ttft_ms": ms, "model": "a" * 16}) + "\n"


@pytest.mark.parametrize("deploy", ["bench", "diagnose", "tune"])
def test_a_run_that_asks_nothing_of_health_publishes_none(tmp_path: Path, deploy: str) -> None:
    written = report_files.write(replace(of_every_status(), command=deploy), tmp_path)
    assert written.faults == ()
    assert not (tmp_path / "latest" / "fleet.prom").exists()
    assert (tmp_path / "latest" / "fleet.html").exists()
    assert report_files.earlier_runs(tmp_path) == {}


# The schema


def test_the_schema_in_docs_is_the_one_that_is_written(update_golden: bool) -> None:
    if update_golden:
        SCHEMA.write_text(schema.json_schema())
    assert SCHEMA.read_text() == schema.json_schema()


def test_what_is_written_is_what_the_schema_says() -> None:
    found = schema.check(of_every_status().to_json())
    assert found.schema_version == 2
    assert [h.status for h in found.hosts] == list(HostStatus)


# The files


def test_a_run_leaves_every_file_and_each_can_be_read(tmp_path: Path) -> None:
    written = report_files.write(of_every_status(), tmp_path)
    assert written.faults == ()
    directory = tmp_path / "latest"
    assert {path.name for path in directory.iterdir()} == {
        *("fleet.json", "fleet.html", "fleet.prom", "junit.xml"),
        *("failed.txt", "pending.txt", "drifted.txt", "retry.txt"),
    }
    schema.check(json.loads((directory / "fleet.json").read_text()))
    assert (directory / "failed.txt").read_text() == "h-failed\nh-unreachable\n"
    assert (directory / "pending.txt").read_text() == "h-pending\n"
    suite = ElementTree.parse(directory / "junit.xml").getroot()[0]
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        **{"tests": "5", "failures": "2", "errors": "1", "skipped": "1"}
    }
    # All but the host that was pending
    assert len(history.read((tmp_path / "history.jsonl").read_text())) == 4


def test_a_run_without_hosts_to_retry_leaves_no_list_and_one_without_hosts_no_fault(
    tmp_path: Path,
) -> None:
    assert report_files.write(report(host("h-ok")), tmp_path).faults == ()
    names = {path.name for path in (tmp_path / "latest").iterdir()}
    assert names == {"fleet.json", "fleet.html", "fleet.prom", "junit.xml"}
    assert report_files.write(replace(report(), run_id="2"), tmp_path).faults == ()


def test_a_fault_in_one_renderer_costs_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: schema.Fleet) -> str:
        raise KeyError("x")

    monkeypatch.setattr(reports, "RENDERERS", {"a.txt": broken, "b.txt": lambda _: "b"})
    written = report_files.write(report(host("h-ok")), tmp_path)
    assert written.faults == ("a.txt: 'x'",)
    names = {path.name for path in (tmp_path / "latest").iterdir()}
    assert names == {"fleet.json", "b.txt"}
    assert (tmp_path / "history.jsonl").exists()


def test_where_nothing_can_be_written_that_is_told_and_nothing_is_raised(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("a file")
    written = report_files.write(report(host("h-ok")), tmp_path / "reports")
    assert any(fault.startswith("fleet.json: ") for fault in written.faults)


def test_history_survives_a_cut_line_and_reaches_the_next_report(tmp_path: Path) -> None:
    lines = "".join(past(f"2026-11-0{day}T00:00:00+00:00", 100 + day) for day in (1, 2, 3))
    (tmp_path / "history.jsonl").write_text(lines + '{"run_id": "cut')
    written = report_files.write(report(host("h-ok")), tmp_path)
    assert [run["median_ttft_ms"] for run in written.report.hosts[0].history] == [101, 102, 103]
    again = report_files.earlier_runs(tmp_path)["h-ok"]
    assert [run.run_id for run in again][-1] == "20261202T101500Z-1a2b"


def test_a_hosts_line_has_its_own_model_and_not_the_runs() -> None:
    own = replace(host("h-own"), model_name="other", model_sha256="b" * 64)
    forwards = replace(host("h-forwards"), model_name="theirs")
    found = schema.check(report(host("h-older"), own, forwards).to_json())
    models = [history.line_of(found, each).model for each in found.hosts]
    assert models == ["a" * 16, "b" * 16, None]


def test_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_files, "MAX_HISTORY_BYTES", 20_000)
    for number in range(200):
        report_files.append(tmp_path, past(f"2026-01-01T00:00:00.{number:06}+00:00", 1))
    assert (tmp_path / "history.jsonl").stat().st_size < 21_000
    kept = report_files.earlier_runs(tmp_path)["h-ok"]
    assert len(kept) == history.KEPT_RUNS
    assert kept[-1].at == "2026-01-01T00:00:00.000199+00:00"


# Renderers


def test_the_page_is_one_file_that_no_text_of_a_host_can_break() -> None:
    page = html.page(schema.load(of_every_status().to_json()))
    assert "alert(1)</script>" not in page
    assert set(re.findall(r"https?://[^\s'\"]+", page)) == {"http://www.w3.org/2000/svg"}
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert [h[0] for h in json.loads(data)["hosts"]] == [f"h-{s.value}" for s in HostStatus]


def test_every_line_of_the_textfile_can_be_read_by_its_collector() -> None:
    text = prometheus.text(schema.load(report(host('h"1\\\n')).to_json()))
    line = re.compile(r'edgellm_\w+\{(\w+="([^"\\\n]|\\["\\n])*",?)*\} -?[0-9.e+]+')
    known: set[str] = set()
    for found in text.splitlines():
        if found.startswith("# TYPE "):
            name = found.split()[2]
            assert name not in known
            known.add(name)
        elif not found.startswith("# HELP "):
            assert line.fullmatch(found), found
            assert found.partition("{")[0] in known
    assert 'edgellm_host_status{host="h\\"1\\\\\\n",site="hall_a",status="ok"} 1' in text


def at(hour: int, *hosts: HostRecord, deploy: str = "qwen", day: int = 2) -> FleetReport:
    ended = f"2026-12-{day:02}T{hour:02}:00:00+00:00"
    return replace(report(*hosts), run_id=f"{day}-{hour}", ended_at=ended, command=deploy)


def scraped(root: Path) -> dict[str, dict[str, float]]:
    """What a collector has of reports/metrics: metric -> host or deploy -> value, 0 left out."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families((root / "metrics" / "fleet.prom").read_text()):
        assert family.name not in found, "a metric twice: its collector refuses the whole file"
        values = found.setdefault(family.name.removeprefix("edgellm_"), {})
        for sample in family.samples:
            labels = sample.labels
            whose = labels.get("host") or labels["deploy"]
            name = " ".join((whose, *(labels[n] for n in ("status",) if n in labels)))
            assert name not in values, "a sample twice: its collector refuses the whole file"
            if sample.value:
                values[name] = sample.value
    return found


def test_a_run_over_some_hosts_leaves_the_others_to_whoever_scrapes(tmp_path: Path) -> None:
    report_files.write(at(1, host("a"), host("b"), host('c"\n')), tmp_path)
    limited = at(2, host("b", HostStatus.FAILED, "x"), deploy="verify")
    assert report_files.write(limited, tmp_path).faults == ()
    for deploy in history.TELL_NOTHING_OF_HEALTH:
        report_files.write(at(3, host("a"), deploy=deploy), tmp_path)
    found = scraped(tmp_path)
    assert found["host_status"] == {"a ok": 1, "b failed": 1, 'c"\n ok': 1}
    asked = found["host_run_end_timestamp_seconds"]
    assert asked["b"] - asked["a"] == 3600
    assert found["run_end_timestamp_seconds"] == {"qwen": asked["a"], "verify": asked["b"]}


def test_a_host_that_the_run_did_not_come_to_stays_as_it_was_known(tmp_path: Path) -> None:
    report_files.write(at(1, host("a", HostStatus.DRIFTED)), tmp_path)
    never = host("b", HostStatus.PENDING)
    report_files.write(at(2, host("a", HostStatus.PENDING), never), tmp_path)
    assert scraped(tmp_path)["host_status"] == {"a drifted": 1, "b pending": 1}
    report_files.write(at(3, host("a"), host("b")), tmp_path)
    assert scraped(tmp_path)["host_status"] == {"a ok": 1, "b ok": 1}


def test_a_host_that_no_run_has_come_to_for_a_month_is_no_longer_published(tmp_path: Path) -> None:
    report_files.write(at(0, host("gone"), host("a"), day=1), tmp_path)
    report_files.write(at(0, host("a"), day=31), tmp_path)
    assert scraped(tmp_path)["host_status"] == {"a ok": 1, "gone ok": 1}
    report_files.write(at(1, host("a"), day=31), tmp_path)
    assert scraped(tmp_path)["host_status"] == {"a ok": 1}


def test_lines_that_no_run_has_written_are_not_published_again(tmp_path: Path) -> None:
    report_files.write(at(1, host("a"), host("b")), tmp_path)
    path = tmp_path / "metrics" / "fleet.prom"
    whole = path.read_text()
    path.write_text(f'{whole}edgellm_host_status{{host="b"\nnode_up 1\nedgellm_x{{host="b"}} 1\n')
    report_files.write(at(2, host("a")), tmp_path)
    assert scraped(tmp_path)["host_status"] == {"a ok": 1, "b ok": 1}
    assert "node_up" not in path.read_text()
    path.write_bytes(b"\xff\x00" + whole.encode()[:500])
    assert report_files.write(at(3, host("a")), tmp_path).faults == ()
    assert scraped(tmp_path)["host_status"] == {"a ok": 1}


def test_the_command_names_few_hosts_and_reads_many_from_the_files() -> None:
    few = schema.load(of_every_status().to_json())
    assert retry.command(few, ("failed.txt", "pending.txt")) == (
        "pyinfra -y inventories/factory.py deploys/qwen.py"
        " --limit h-failed --limit h-unreachable --limit h-pending"
    )
    many = report(*(host(f"h{n}", HostStatus.FAILED) for n in range(13)))
    listed = '"${EDGELLM_REPORTS_DIR:-reports}"/20261202T101500Z-1a2b/failed.txt'
    assert retry.command(schema.load(many.to_json()), ("failed.txt",)) == (
        f"test -s {listed} && pyinfra -y inventories/factory.py deploys/qwen.py"
        f" $(sed 's/^/--limit=/' {listed})"
    )


@pytest.mark.parametrize("found_by", ["audit", "verify"])
def test_what_has_drifted_is_mended_by_a_roll_out(found_by: str) -> None:
    found = replace(
        report(host("a", HostStatus.DRIFTED)),
        command=found_by,
        invocation=("pyinfra", "/e/my_verify.py", f"/e/deploys/{found_by}.py"),
    )
    assert retry.command(schema.load(found.to_json()), ("drifted.txt",)) == (
        "pyinfra /e/my_verify.py /e/deploys/qwen.py --limit a"
    )


def test_an_address_is_kept_without_its_password_and_its_signature() -> None:
    source = "model_source=https://bob:hunter2@models.example/q.gguf?X-Amz-Signature=abcdef"
    assert retry.invocation_of(["pyinfra", "i.py", "d.py", "--data", source])[3:] == [
        "--data",
        "model_source=https://…@models.example/q.gguf?…",
    ]


def test_a_variable_of_a_key_by_its_name_is_kept() -> None:
    argv = ["pyinfra", "i.py", "d.py", "--data", "api_key_env=LLM_KEY", "--data", "api_key=x"]
    assert retry.invocation_of(argv)[3:] == ["--data", "api_key_env=LLM_KEY", "--data", "api_key=…"]
    by_mistake = ["pyinfra", "i.py", "d.py", "--data", "api_key_env=sk-live-0123456789"]
    assert retry.invocation_of(by_mistake)[3:] == ["--data", "api_key_env=…"]


@pytest.mark.parametrize(
    "secret",
    [
        ["--ssh-password", "s3cret"],
        ["--password=s3cret"],
        ["--key-password", "s3cret"],
        ["--data", "api_key=s3cret"],
        ["--data=hub_token=s3cret"],
    ],
)
def test_no_secret_of_the_command_line_is_kept(secret: list[str]) -> None:
    kept = retry.invocation_of(["/x/pyinfra", "-y", "i.py", *secret, "--limit", "a", "d.py"])
    assert "s3cret" not in " ".join(kept)
    assert [word for word in kept if not word.startswith(("--data", "api", "hub"))] == [
        *("pyinfra", "-y", "i.py", "d.py")
    ]


# The exit code


def failed(fault: Fault) -> HostRecord:
    return replace(host("f", HostStatus.FAILED), fault=fault)


@pytest.mark.parametrize(
    ("hosts", "code"),
    [
        ([], 0),
        ([host("a")], 0),
        ([host("a", HostStatus.DRIFTED), host("b")], 2),
        ([host("a", HostStatus.UNREACHABLE), host("b", HostStatus.DRIFTED)], 3),
        ([host("a", HostStatus.UNREACHABLE), host("b", HostStatus.PENDING)], 3),
        ([host("a", HostStatus.PENDING), host("b")], 1),
        ([failed(Fault.INPUT), host("a", HostStatus.UNREACHABLE)], 4),
        ([failed(Fault.HOST), failed(Fault.INPUT), host("a", HostStatus.UNREACHABLE)], 1),
    ],
)
def test_the_exit_code_is_of_what_a_person_has_to_see_first(
    hosts: list[HostRecord], code: int
) -> None:
    assert exit_code(report(*hosts)) == code


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_is_told_whatever_the_hosts_are_like(name: str, code: int) -> None:
    assert exit_code(replace(report(failed(Fault.HOST)), interrupted_by=name)) == code


def test_renderers_are_told_apart_by_their_file_names() -> None:
    def is_one(render: Callable[[schema.Fleet], str]) -> bool:
        return isinstance(render(schema.load(report().to_json())), str)

    assert all(map(is_one, reports.RENDERERS.values()))
