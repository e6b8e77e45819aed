"""One run as junit.xml: a test case a host, for the CI that rolls out."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from edgellm.reports.schema import Fleet, Host, Status

# What XML 1.0 cannot hold, not even escaped: https://www.w3.org/TR/xml/#charsets
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def xml(fleet: Fleet) -> str:
    """JUnit's own words: a host that failed or drifted is a failure, one that could not be asked an
    error, one that the run did not come to is skipped."""
    counts = {
        "tests": len(fleet.hosts),
        "failures": sum(host.status in (Status.FAILED, Status.DRIFTED) for host in fleet.hosts),
        "errors": len(fleet.with_status(Status.UNREACHABLE)),
        "skipped": len(fleet.with_status(Status.PENDING)),
    }
    numbers = {name: str(count) for name, count in counts.items()}
    numbers["time"] = f"{fleet.duration_s:.3f}"
    deploy = _text(fleet.deploy or "edgellm")
    suites = ElementTree.Element("testsuites", {"name": f"edgellm {deploy}", **numbers})
    suite = ElementTree.SubElement(
        suites,
        "testsuite",
        # Readers of JUnit's format know no zone there
        {"name": deploy, **numbers, "timestamp": _text(fleet.started_at[:19])},
    )
    told = {"run_id": fleet.run_id, "model": fleet.model.name, "model_sha256": fleet.model.sha256}
    _properties(suite, {**told, "interrupted_by": fleet.interrupted_by})
    for host in fleet.hosts:
        _case(suite, deploy, host)
    ElementTree.indent(suites)
    body = ElementTree.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _case(suite: ElementTree.Element, deploy: str, host: Host) -> None:
    measured = host.measured
    case = ElementTree.SubElement(
        suite,
        "testcase",
        {"classname": f"edgellm.{deploy}", "name": _text(host.name)},
    )
    _properties(
        case,
        {
            "hardware_class": host.hardware_class,
            "kernel": host.kernel,
            "release": host.release,
            "median_ttft_ms": measured.median_ttft_ms,
            "p95_ttft_ms": measured.p95_ttft_ms,
            "output_throughput": measured.output_throughput,
        },
    )
    word = {
        Status.FAILED: "failure",
        Status.DRIFTED: "failure",
        Status.UNREACHABLE: "error",
        Status.PENDING: "skipped",
    }.get(host.status)
    reason = _text(host.reason or host.status.value)
    if word is not None:
        told = {"message": reason}
        if word != "skipped":
            told["type"] = host.status.value
        ElementTree.SubElement(case, word, told).text = None if word == "skipped" else reason
    if host.verdict is not None and host.verdict.warnings:
        ElementTree.SubElement(case, "system-out").text = "\n".join(
            _text(warning) for warning in host.verdict.warnings
        )


def _properties(parent: ElementTree.Element, values: dict[str, str | float | None]) -> None:
    known = {name: value for name, value in values.items() if value is not None}
    if known:
        properties = ElementTree.SubElement(parent, "properties")
        for name, value in known.items():
            ElementTree.SubElement(properties, "property", {"name": name, "value": _text(value)})


def _text(value: str | float) -> str:
    return _NOT_XML.sub("�", str(value))
