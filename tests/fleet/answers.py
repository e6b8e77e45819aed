"""What a fake host answers: one set of answers, and another from the start of its service on."""

from __future__ import annotations

from typing import Any

Responses = dict[str, Any]
START = "systemctl start --no-block edgellm.service"


class Answers(dict[str, Any]):
    """For `fake_responses`: pyinfra's connector takes the first text of `items` that it finds."""

    def __init__(self, before: Responses, after: Responses) -> None:
        super().__init__(before)
        self.before, self.after, self.started = before, after, False

    def __repr__(self) -> str:
        return f"Answers({self.before!r}, {self.after!r})"

    def items(self) -> list[tuple[str, Any]]:  # type: ignore[override]  # no view of itself
        answers = self.after if self.started else self.before
        return [*answers.items(), (START, _Start(self))]


class _Start(dict[str, Any]):
    """The answer to the start itself, which is looked into for nothing else."""

    def __init__(self, host: Answers) -> None:
        super().__init__()
        self._host = host

    def get(self, key: str, default: Any = None) -> Any:
        self._host.started = True
        return super().get(key, default)
