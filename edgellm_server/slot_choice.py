"""Which of llama.cpp's slots a prompt goes to. Pure.

Two things depend on it, and llama.cpp's own choice serves only the first:
- the slot whose KV cache begins as the prompt does need not compute that part again;
- llama.cpp fills each batch from the slots in order of their numbers, so a long prompt in a low
  slot keeps all higher ones waiting until it is through (measured: a short request behind a
  900-token one had its first token after 9.7 s from above, after 0.7 s from below).
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import dataclass

# Differences below this, in characters, are no reason to prefer a slot: some 30 tokens.
SAME_COST_CHARS = 120


@dataclass(slots=True)
class SlotState:
    """What is known of one slot. `text`: what its KV cache holds, as text of a conversation."""

    index: int
    text: str = ""
    busy: bool = False
    # Characters of its prompt that are still to be computed; 0 once tokens come.
    prefill_chars: int = 0
    last_used: int = 0  # a count of requests, not a time


def choose_slot(slots: Sequence[SlotState], text: str, long_chars: int) -> SlotState:
    """A free slot for a prompt. `long_chars`: from this much to compute on, a prompt is long.

    Raises ValueError where none is free.
    """
    free = [slot for slot in slots if not slot.busy]
    if not free:
        raise ValueError("no free slot")
    # Below all long prompts that are being computed, a prompt is served beside them.
    ceiling = min(
        (s.index for s in slots if s.busy and s.prefill_chars >= long_chars), default=None
    )
    below = [slot for slot in free if ceiling is None or slot.index < ceiling]
    cost = {slot.index: len(text) - common_chars(slot.text, text) for slot in free}
    half = len(slots) // 2
    is_long = min(cost.values()) >= long_chars
    candidates = free
    if not is_long:
        candidates = [slot for slot in below if cost[slot.index] < long_chars] or free
    least = min(cost[slot.index] for slot in candidates)
    best = [slot for slot in candidates if cost[slot.index] <= least + SAME_COST_CHARS]
    if is_long:
        # In the upper half, so that whoever comes later can be below; there not over what was used
        # last: a long beginning is worth the most to whoever asks about it again.
        upper = [slot for slot in best if slot.index >= half] or best
        return min(upper, key=lambda s: (loses(s, text), s.last_used, -s.index))
    # Of equals the one whose cache is worth least, in the lower half where there is a choice.
    return min(best, key=lambda s: (loses(s, text), s.index >= half, s.last_used, s.index))


def common_chars(one: str, other: str) -> int:
    # Texts, not paths: character by character is what is wanted.
    return len(os.path.commonprefix([one, other]))  # noqa: RUF071


def loses(slot: SlotState, text: str) -> bool:
    """Whether `text` would overwrite something of the slot's cache."""
    return len(slot.text) > common_chars(slot.text, text)
