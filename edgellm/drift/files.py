"""Files, directories, links, and the two large artifacts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgellm import layout
from edgellm.desired import DesiredState, PathGroup
from edgellm.drift.host import python_update
from edgellm.drift.verdict import KnobState, Verdict, in_order, off, unknown
from edgellm.observed import ObservedState, PathState


def path_fault(found: PathState | None, wanted: PathState) -> str | None:
    """What is wrong at a path: 'mode 0777, not 0644; other content'. None: nothing."""
    if found is None:
        return "not read"
    if found.kind != wanted.kind:
        if found.kind == "absent":
            return "not there"
        return f"{_kind(found)}, not {_kind(wanted)}"
    if wanted.kind == "link":
        return None if found.target == wanted.target else f"leads to {found.target}"
    faults = []
    for name in ("owner", "group", "mode"):
        have, want = getattr(found, name), getattr(wanted, name)
        if have != want:
            faults.append(f"{name} {have}, not {want}")
    if found.sha256 != wanted.sha256:
        faults.append("other content")
    return "; ".join(faults) or None


def _kind(state: PathState) -> str:
    """For a sentence; "other" is a device, a pipe or a socket."""
    kinds = {"link": f"a link to {state.target}", "other": "no file", "absent": "nothing"}
    return kinds.get(state.kind, f"a {state.kind}")


def path_states(
    group: PathGroup, paths: Mapping[str, PathState], knob: str | None = None
) -> tuple[KnobState, ...]:
    """One knob a path, by its name or as `knob`."""
    return tuple(
        _path(knob or path, path, paths.get(path), wanted)
        for path, wanted in wanted_paths(group).items()
    )


def wanted_paths(group: PathGroup) -> dict[str, PathState]:
    return {
        **{item.path: item.state for item in group.directories},
        **{file.path: file.state for file in group.files},
        **{path: PathState(kind="link", target=target) for path, target in group.links},
        **{path: PathState(kind="absent") for path in group.absent},
    }


def _path(knob: str, path: str, found: PathState | None, wanted: PathState) -> KnobState:
    want, have = _words(path, wanted), None if found is None else _words(path, found)
    fault = path_fault(found, wanted)
    if found is None:
        return unknown(knob, f"{path} was not read", want)
    if fault is None:
        return in_order(knob, want, have, by=path)
    if wanted.kind == "absent":
        fault = "of an earlier plan, not wanted by this one"
    return off(knob, want, have, fault, configured=have, by=path)


def _words(path: str, state: PathState) -> str:
    if state.kind == "absent":
        return "none"
    if state.kind == "link":
        return f"-> {state.target}"
    words = f"{state.kind} {state.mode} {state.owner}:{state.group}"
    # A digest of a secret tells who guesses whether the guess is right
    if state.sha256 is None or path.startswith(f"{layout.CONFIG_DIR}/"):
        return words
    return f"{words} {state.sha256[:12]}"


def only(group: PathGroup, places: Iterable[str]) -> PathGroup:
    """The files of a group that are among `places`."""
    chosen = set(places)
    return PathGroup(
        files=tuple(file for file in group.files if file.path in chosen),
        absent=tuple(path for path in group.absent if path in chosen),
    )


def file_faults(group: PathGroup, paths: Mapping[str, PathState]) -> tuple[list[str], str | None]:
    """(['/etc/…: mode 0777, not 0644'], what of the group was not read: None, all of it was)."""
    states = path_states(group, paths)
    faults = [f"{s.knob}: {s.reason}" for s in states if s.verdict is Verdict.DRIFTED]
    silent = [str(s.reason) for s in states if s.verdict is Verdict.UNKNOWN]
    return faults, "; ".join(silent) or None


def artifact_states(desired: DesiredState, observed: ObservedState) -> tuple[KnobState, ...]:
    """Model and runtime, by their bytes."""
    states = []
    if desired.model_path is not None:
        why = "not the bytes, mode or owner that were verified"
        states.append(_artifact("model", desired.model_path, observed.whole, why))
    update = python_update(observed.profile)
    why = "not the files, bytes, modes or owners that were verified"
    if update is not None:
        why = f"Python {update}: it has not run under this one yet"
    states.append(_artifact("runtime", desired.runtime_directory, observed.whole, why))
    return tuple(states)


def _artifact(knob: str, path: str, whole: Mapping[str, bool], why: str) -> KnobState:
    found = whole.get(path)
    if found is None:
        return unknown(knob, f"{path} was not read", path)
    return in_order(knob, path, "whole") if found else off(knob, path, "not whole", why)
