"""What remote/diagnose.sh printed, and what a run knows of the host -> the files of a bundle. Pure.

Every text goes through edgellm/redaction.py on its way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm import redaction

# sched(7), and 7 of sched_ext
POLICIES = {0: "other", 1: "fifo", 2: "rr", 3: "batch", 5: "idle", 6: "deadline", 7: "ext"}
COLUMNS = ("pid", "tid", "thread", "policy", "rtprio", "nice", "cpu", "cpus", "run_s", "wait_s")
MOST_BYTES = 2 * 2**20  # of one file; the script has bounds of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Sections by name, and why parts of them could not be read."""

    sections: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]  # "journal: no journalctl"
    complete: bool


def collected(lines: Iterable[str], mark: str) -> Collected:
    """The script's output -> its sections. What comes before the first is somebody else's."""
    sections: dict[str, list[str]] = {}
    missing = []
    name = None
    complete = False
    for line in lines:
        if line.startswith(f"{mark}? "):
            missing.append(f"{name or 'all'}: {line.removeprefix(f'{mark}? ')}")
        elif line.startswith(f"{mark} "):
            name = line.removeprefix(f"{mark} ").strip()
            complete = complete or name == "end"
            sections.setdefault(name, [])
        elif name is not None:
            sections[name].append(line)
    sections.pop("end", None)
    return Collected(
        sections={key: tuple(_trimmed(value)) for key, value in sections.items()},
        missing=tuple(missing),
        complete=complete,
    )


def bundle(
    host: str,
    found: Collected,
    *,
    about: Mapping[str, Any],
    documents: Mapping[str, Any],
    absent: Mapping[str, str],
    secrets: Iterable[str] = (),
) -> dict[str, str]:
    """{name: text} of a host's bundle.

    `about`: what the README begins with. `documents`: plain values, each a JSON file of its own.
    `absent`: document -> why there is none.
    """
    secrets = tuple(secrets)
    files = {}
    for name, value in documents.items():
        files[f"{name}.json"] = json.dumps(_without(value, secrets), indent=1, sort_keys=True)
    for name, lines in found.sections.items():
        if name == "journal":
            holds = holds_texts(found.sections.get("installed", ()))
            files["journal.txt"] = redaction.journal(lines, holds_texts=holds, secrets=secrets)
        else:
            files[f"{name}.txt"] = redaction.redacted("\n".join(lines), secrets)
    if threads := found.sections.get("threads"):
        files["threads.txt"] = redaction.redacted(threads_table(threads), secrets)
    holes = [*(f"{name}: {why}" for name, why in absent.items()), *found.missing]
    if not found.complete:
        holes.append("the host's answer ended before its end")
    files["README.txt"] = redaction.redacted(_readme(host, about, files, holes), secrets)
    return {name: text[-MOST_BYTES:].rstrip("\n") + "\n" for name, text in sorted(files.items())}


def holds_texts(installed: Sequence[str]) -> bool:
    """Whether the journal may hold prompts, by the release's server.env; also where it is not
    there to tell."""
    settings = dict(line.split("=", 1) for line in installed if line.startswith("EDGELLM_"))
    return settings.get("EDGELLM_LOG_PROMPTS") != "0" or "EDGELLM_APP" in settings


def threads_table(lines: Iterable[str]) -> str:
    """The lines of /proc/<pid>/task/<tid>/{stat,status,schedstat} as one line a thread."""
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        kind, _, rest = line.partition(" ")
        if kind == "stat" and (row := _thread(rest)) is not None:
            rows.setdefault(row["tid"], {}).update(row)
        elif kind == "cpus":
            tid, _, value = rest.partition(" ")
            rows.setdefault(tid, {})["cpus"] = value.partition(":")[2].strip()
        elif kind == "schedstat" and len(words := rest.split()) >= 3:
            rows.setdefault(words[0], {}).update(
                run_s=f"{int(words[1]) / 1e9:.2f}", wait_s=f"{int(words[2]) / 1e9:.2f}"
            )
    table = [COLUMNS, *(tuple(row.get(name, "?") for name in COLUMNS) for row in rows.values())]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def _thread(stat: str) -> dict[str, str] | None:
    """'812 815 (engine-1) S …' -> policy, priority, last CPU."""
    found = re.fullmatch(r"(\d+) (\d+) \((.*)\) (.+)", stat)
    fields = found[4].split() if found else []
    if found is None or len(fields) < 39:
        return None
    return {
        "pid": found[1],
        "tid": found[2],
        "thread": found[3].replace(" ", "_"),
        "nice": fields[16],
        "cpu": fields[36],
        "rtprio": fields[37],
        "policy": POLICIES.get(int(fields[38]), fields[38]),
    }


def _readme(
    host: str, about: Mapping[str, Any], files: Mapping[str, str], holes: Sequence[str]
) -> str:
    lines = [f"edgellm: what {host} was like", ""]
    lines += [f"{name}: {value}" for name, value in about.items()]
    lines += ["", "Not here, and why:", *(f"  {hole}" for hole in holes or ("nothing is missing",))]
    lines += ["", "Files:", *(f"  {name}" for name in sorted(files))]
    lines += ["", "API keys, their hashes, prompts and answers were taken out: <removed>.", ""]
    return "\n".join(lines)


def _without(value: Any, secrets: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return redaction.redacted(value, secrets)
    if isinstance(value, Mapping):
        return {key: _without(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without(item, secrets) for item in value]
    return value


def _trimmed(lines: list[str]) -> list[str]:
    while lines and not lines[-1]:
        lines = lines[:-1]
    return lines
