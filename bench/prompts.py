"""What the clients ask. Pure: both servers get the very same messages.

Cold means that nothing of it was ever seen: the nonce is the first text of the first message, right
behind the few tokens that begin every chat.
"""

from __future__ import annotations

from dataclasses import dataclass

Message = dict[str, str]

# What a device's maker would write; both servers get it from the client, ours knows it as setting.
SYSTEM_PROMPT = (
    "You are the assistant of a packaging line. Operators ask you while they stand at the machine, "
    "often with gloves on and little time. Answer in one or two short sentences, in plain words. "
    "Where you do not know, say so and tell them whom to ask."
)

QUESTIONS = (
    "Why does the film tear at the sealing bar?",
    "What does a blinking amber lamp mean?",
    "How often is the cutter to be oiled?",
    "The belt squeaks. What should I check first?",
    "How do I change the label roll?",
    "Which gloves may I wear near the heater?",
    "The scale shows a different weight each time. Why?",
    "What do I write down at the end of a shift?",
    "May I restart the line after an emergency stop?",
    "How long does the sealing bar take to cool?",
    "Cartons arrive crushed at the end. What is wrong?",
    "Who may open the control cabinet?",
    "How do I clean the photo cell?",
    "The printer skips every third date. What now?",
    "What is the right pressure for the grippers?",
    "Can I run thinner film on this machine?",
    "Why does the line stop when the door closes?",
    "How do I see how many packs we made today?",
    "The glue does not hold. What should I look at?",
    "When is the next inspection due?",
)  # fmt: skip

TURNS = (
    "The line stopped again. Where do I begin?",
    "The lamp is red now. What does that mean?",
    "I have opened the door and closed it again.",
    "It starts, but the film runs to the left.",
    "I moved the guide a little. What comes next?",
    "Now the seal looks too weak on one side.",
    "The bar is at the right temperature, I think.",
    "Should I call someone, or try it once more?",
    "It runs now. What should I watch for?",
    "What do I write into the shift book?",
)  # fmt: skip

# About 18 tokens a sentence.
_SENTENCES = (
    "On {day} at {hour} o'clock the line at hall {hall} stood still for {minutes} minutes.",
    "The operator noted a pressure of {minutes} and a temperature of {hour} degrees at the bar.",
    "After the cutter was cleaned, {hall} cartons were sorted out and packed again by hand.",
    "The fitter asked for a new belt, order number {minutes}-{hall}, which is due on {day}.",
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
TOKENS_A_SENTENCE = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One request: messages and a cap of generated tokens."""

    messages: tuple[Message, ...]
    max_tokens: int


def known_prefix(number: int, max_tokens: int) -> Chat:
    """A short question behind the system prompt that every request of this kind begins with."""
    return Chat(
        messages=(_system(SYSTEM_PROMPT), _user(QUESTIONS[number % len(QUESTIONS)])),
        max_tokens=max_tokens,
    )


def cold(nonce: str, number: int, max_tokens: int) -> Chat:
    """A short prompt nobody has seen: some 45 tokens with the template's own."""
    system = f"{nonce} is your name. Answer the operators of a packaging line in one sentence."
    return Chat(
        messages=(_system(system), _user(QUESTIONS[number % len(QUESTIONS)])),
        max_tokens=max_tokens,
    )


def long_cold(nonce: str, n_tokens: int, max_tokens: int) -> Chat:
    """About `n_tokens` tokens that nobody has seen."""
    return Chat(
        messages=(_system(f"{nonce} {_log_book(n_tokens)}"), _user("What should I do next?")),
        max_tokens=max_tokens,
    )


def long_known(nonce: str, n_tokens: int, number: int, max_tokens: int) -> Chat:
    """A short question behind about `n_tokens` tokens, known once the nonce was asked before."""
    return Chat(
        messages=(
            _system(f"{nonce} {_log_book(n_tokens)}"),
            _user(QUESTIONS[number % len(QUESTIONS)]),
        ),
        max_tokens=max_tokens,
    )


def conversation_start(nonce: str) -> tuple[Message, ...]:
    return (_system(f"{nonce}: {SYSTEM_PROMPT}"),)


def next_turn(so_far: tuple[Message, ...], turn: int, max_tokens: int) -> Chat:
    """`turn` counts from 1."""
    return Chat(messages=(*so_far, _user(TURNS[turn - 1])), max_tokens=max_tokens)


def answered(chat: Chat, answer: str) -> tuple[Message, ...]:
    return (*chat.messages, {"role": "assistant", "content": answer})


def essay(nonce: str, max_tokens: int) -> Chat:
    """Asks for more than `max_tokens` lets through: there is a stream to time."""
    text = "Count up from 1000 in steps of 7, one number a line, without any other word."
    return Chat(messages=(_system(f"{nonce} is your name."), _user(text)), max_tokens=max_tokens)


def _log_book(n_tokens: int) -> str:
    count = max(1, (n_tokens - 30) // TOKENS_A_SENTENCE)
    return " ".join(
        _SENTENCES[i % len(_SENTENCES)].format(
            day=_DAYS[i % 5], hour=i % 24, hall=1 + i % 9, minutes=3 + 7 * i % 50
        )
        for i in range(count)
    )


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
