"""Servers that are wrong in one way each, and one that is sound: what the probe calls them."""

from __future__ import annotations

from dataclasses import dataclass

from bench.results import Bar, Measure
from bench.stats import Summary
from edgellm_server.probe import Options, probe
from tests.server.scripted import END, WORDS, Behaviour, event, sends, serving, slowly, talks

NAMED = Bar(
    key="misbehaving_named", label="servers that misbehave: named right", limit=1, sense="at_least"
)
FALSE_ALARMS = Bar(key="false_alarms", label="faults named at a sound server", limit=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    what: str
    kind: str | None  # the fault's name; None: sound
    chat: Behaviour


SERVERS = (
    Server(
        what="buffers its stream",
        kind="buffered_stream",
        chat=talks(together=lambda number: 12),
    ),
    Server(
        what="sends empty chunks",
        kind="empty_chunks",
        chat=sends(*slowly(*[""] * 40, "Hi"), END),
    ),
    Server(
        what="repeats a cached answer",
        kind="cached_answer",
        chat=sends(0.03, *slowly(*(f"{word} " for word in WORDS)), END),
    ),
    Server(
        what="answers 200 with an error body",
        kind="error_body",
        chat=sends(b'{"error": {"message": "no slot"}}', content_type="application/json"),
    ),
    Server(
        what="stalls after the first token",
        kind="stalled",
        chat=sends(0.03, event("The"), 3.0, END),
    ),
    Server(
        what="returns garbage",
        kind="garbled_answer",
        chat=sends(*slowly(*["\x01\x02\x7f "] * 12), END),
    ),
    Server(what="is sound", kind=None, chat=talks()),
)


def measures() -> list[Measure]:
    """Each asked as a host is asked, with shorter deadlines."""
    told: dict[str, list[str]] = {}
    for server in SERVERS:
        with serving(server.chat) as url:
            options = Options(
                url=url,
                model="m",
                n=3,
                load_deadline_s=5.0,
                first_token_deadline_s=2.0,
                stall_deadline_s=1.0,
                request_deadline_s=5.0,
            )
            failures = probe(options)["failures"]
        told[server.what] = sorted({failure["kind"] for failure in failures})
    wrong = [server for server in SERVERS if server.kind is not None]
    named = sum(told[server.what] == [server.kind] for server in wrong) / len(wrong)
    alarms = sum(len(told[server.what]) for server in SERVERS if server.kind is None)
    return [
        Measure(
            bar=NAMED,
            summary=Summary(value=named, n=len(wrong), spread=(named, named)),
            details=told,
        ),
        Measure(bar=FALSE_ALARMS, summary=Summary(value=alarms, n=1, spread=(alarms, alarms))),
    ]
