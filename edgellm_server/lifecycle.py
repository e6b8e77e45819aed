"""What process, connections and app tell each other about starting, draining and being alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# In an ASGI scope: this WebSocket is in mid-answer, and is to be closed after it, not in it.
ANSWERING = "edgellm.answering"


@dataclass(slots=True)
class Lifecycle:
    """One a process; changed on the event loop only."""

    # The app says itself when it is ready (its model is loaded); else it is once it has started.
    app_announces_ready: bool = False
    # SIGTERM came: what runs is finished, nothing new begins.
    draining: bool = False
    # Seconds since the engine last did something for work that it has; 0 while it has none.
    engine_silent_s: Callable[[], float] = lambda: 0.0
    engine_stall_s: float = 120.0


LIFECYCLE = Lifecycle()
