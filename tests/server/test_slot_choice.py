"""Which slot a prompt goes to: beside long prompts, behind its own conversation, over old ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm_server.slot_choice import SAME_COST_CHARS, SlotState, choose_slot

LONG = 400  # characters


def slots(*texts: str) -> list[SlotState]:
    return [SlotState(index, text) for index, text in enumerate(texts)]


def test_a_long_prompt_takes_the_highest_slot_and_a_short_one_another() -> None:
    some = slots("", "", "", "")
    assert choose_slot(some, "x" * LONG, LONG).index == 3
    assert choose_slot(some, "hello", LONG).index == 0


def test_long_prompts_take_turns_in_the_upper_half() -> None:
    """Else each would overwrite the one before, which may be asked about again."""
    some = slots("", "", "", "")
    for count, expected in enumerate((3, 2, 3, 2), start=1):
        chosen = choose_slot(some, chr(64 + count) * LONG, LONG)
        assert chosen.index == expected
        chosen.text, chosen.last_used = chr(64 + count) * LONG, count


def test_a_long_text_more_goes_where_its_beginning_is() -> None:
    some = slots("", "T" * 3 * LONG, "", "")
    assert choose_slot(some, "T" * 3 * LONG + "more" * LONG, LONG).index == 1


def test_a_question_about_a_long_text_goes_where_the_text_is() -> None:
    some = slots("", "", "", "T" * LONG)
    assert choose_slot(some, "T" * LONG + "and why?", LONG).index == 3


def test_a_short_prompt_stays_below_a_long_one_that_is_being_computed() -> None:
    some = slots("", "", "hello world, once more " * 20, "")
    some[1].busy, some[1].prefill_chars = True, LONG
    assert choose_slot(some, "hello", LONG).index == 0
    some[1].prefill_chars = 10  # nearly through: nobody waits for it any more
    some[0].busy = True
    assert choose_slot(some, "hello", LONG).index == 3  # which is empty


def test_a_prompt_that_cannot_be_below_is_served_all_the_same() -> None:
    some = slots("", "", "")
    some[0].busy, some[0].prefill_chars = True, LONG
    assert choose_slot(some, "hello", LONG).index == 1


def test_a_conversation_goes_on_where_its_beginning_is() -> None:
    talk = "\x1euser\x1f" + "about the weather in the north " * 10
    some = slots("", talk, "\x1euser\x1fsomething else", "")
    assert choose_slot(some, talk + " and the south?", LONG).index == 1


def test_of_equal_slots_the_one_is_taken_whose_content_was_used_longest_ago() -> None:
    some = slots("one conversation", "another one", "a third", "a fourth")
    for slot, used in zip(some, (3, 2, 1, 4), strict=True):
        slot.last_used = used
    assert choose_slot(some, "something new", LONG).index == 1  # and in the lower half


def test_a_slot_that_would_lose_nothing_is_preferred() -> None:
    start = "\x1esystem\x1fYou are brief."
    some = slots(start + "\x1euser\x1fHi", start, start + "\x1euser\x1fYo", start)
    some[0].last_used, some[2].last_used = 1, 2
    assert choose_slot(some, start + "\x1euser\x1fWho?", LONG).index == 1


def test_a_single_slot_is_taken_by_all() -> None:
    some = slots("")
    assert choose_slot(some, "x" * 10 * LONG, LONG).index == 0
    some[0].busy = True
    with pytest.raises(ValueError, match="no free slot"):
        choose_slot(some, "hello", LONG)


TEXTS = st.text(alphabet="ab", max_size=3 * LONG)


@given(
    st.lists(
        st.tuples(TEXTS, st.booleans(), st.integers(0, 2 * LONG), st.integers(0, 99)),
        min_size=1,
        max_size=8,
    ),
    TEXTS,
)
def test_what_is_chosen_is_free_and_never_behind_a_long_prompt_for_nothing(
    states: list[tuple[str, bool, int, int]], text: str
) -> None:
    some = [
        SlotState(index, held, busy, prefill if busy else 0, used)
        for index, (held, busy, prefill, used) in enumerate(states)
    ]
    free = [slot for slot in some if not slot.busy]
    if not free:
        return
    chosen = choose_slot(some, text, LONG)
    assert chosen in free
    long_ones = [s.index for s in some if s.busy and s.prefill_chars >= LONG]
    below = [slot for slot in free if not long_ones or slot.index < min(long_ones)]
    if len(text) < LONG - SAME_COST_CHARS and below:
        assert chosen in below
