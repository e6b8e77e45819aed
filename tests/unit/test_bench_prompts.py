"""Cold prompts share nothing, known ones share all but the question."""

from __future__ import annotations

from bench import prompts


def text(chat: prompts.Chat) -> str:
    return "".join(message["content"] for message in chat.messages)


def test_cold_prompts_differ_from_their_first_character_on() -> None:
    one, other = prompts.cold("aaaa", 0, 4), prompts.cold("bbbb", 0, 4)
    assert text(one)[0] != text(other)[0]


def test_a_known_prefix_is_the_same_whatever_is_asked() -> None:
    one, other = prompts.known_prefix(0, 4), prompts.known_prefix(1, 4)
    assert one.messages[0] == other.messages[0]
    assert one.messages[1] != other.messages[1]


def test_a_conversation_only_ever_grows() -> None:
    messages = prompts.conversation_start("aaaa")
    for turn in range(1, len(prompts.TURNS) + 1):
        chat = prompts.next_turn(messages, turn, 8)
        assert chat.messages[: len(messages)] == messages
        messages = prompts.answered(chat, "Yes.")
    assert [m["role"] for m in messages[1:]] == ["user", "assistant"] * 10


def test_a_long_prompt_grows_with_its_tokens() -> None:
    short, long = (prompts.long_cold("aaaa", n, 4) for n in (445, 900))
    assert 1.8 < len(text(long)) / len(text(short)) < 2.3
