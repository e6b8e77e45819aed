"""A model that counts: small enough for an emulated CPU, and its answer is known in advance.

The Llama architecture with random layers, too weak to change what the next token is: each word's
embedding makes the output layer prefer the next word, and every other token's the first word. So
whatever it is asked, it says "one two three … twelve". Its weights are in Q4_0, the product's own
default. Format: ggml-org/ggml docs/gguf.md.
"""

from __future__ import annotations

import random
import struct
from array import array
from pathlib import Path
from typing import Any

NAME = "counting-machine"
WORDS = (
    *("one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)

N_EMBD, N_FF, N_LAYERS, N_HEADS, N_CTX = 64, 128, 2, 4, 4096
WEAK = 0.02  # of the random layers; the embedding of a token has length 1
SURE = 4.0  # of the output layer: its logits are some 30 above all others

SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>")
UNKNOWN_ID, BEGIN_ID, END_ID = range(3)
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
TOKENS = (*SPECIAL, *BYTES, *(f"\u2581{word}" for word in WORDS))  # SentencePiece's space
FIRST_WORD_ID = len(SPECIAL) + len(BYTES)
TOKEN_TYPES = (2, 3, 3, *(6 for _ in BYTES), *(1 for _ in WORDS))  # unknown, control, byte, normal
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# gguf_metadata_value_type
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
ALIGNMENT = 32
# ggml_type; block_q4_0 of ggml-common.h: 32 weights share a scale, the halves lie in one byte
F32, Q4_0 = 0, 2
BLOCK = 32
WEIGHTS_BYTES = 60_000  # and a little more; the rest of the file is its header


def write(path: Path) -> None:
    """The same bytes at every call; about 80 KB."""
    tensors = _tensors()
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(METADATA))
    head += b"".join(_text(key) + _value(kind, value) for key, (kind, value) in METADATA.items())
    data = b""
    for name, (shape, values) in tensors.items():
        kind, content = (F32, array("f", values).tobytes()) if len(shape) == 1 else _q4_0(values)
        head += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", kind, len(data))
        data += _padded(content)
    path.write_bytes(_padded(head) + data)


METADATA: dict[str, tuple[int, Any]] = {
    "general.architecture": (STRING, "llama"),
    "general.name": (STRING, NAME),
    "general.file_type": (UINT32, 2),  # Q4_0
    "llama.context_length": (UINT32, N_CTX),
    "llama.embedding_length": (UINT32, N_EMBD),
    "llama.block_count": (UINT32, N_LAYERS),
    "llama.feed_forward_length": (UINT32, N_FF),
    "llama.rope.dimension_count": (UINT32, N_EMBD // N_HEADS),
    "llama.attention.head_count": (UINT32, N_HEADS),
    "llama.attention.head_count_kv": (UINT32, N_HEADS),
    "llama.attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5),
    "tokenizer.ggml.model": (STRING, "llama"),
    "tokenizer.ggml.tokens": (ARRAY, (STRING, TOKENS)),
    "tokenizer.ggml.scores": (ARRAY, (FLOAT32, [0.0] * len(TOKENS))),
    "tokenizer.ggml.token_type": (ARRAY, (INT32, TOKEN_TYPES)),
    "tokenizer.ggml.bos_token_id": (UINT32, BEGIN_ID),
    "tokenizer.ggml.eos_token_id": (UINT32, END_ID),
    "tokenizer.ggml.unknown_token_id": (UINT32, UNKNOWN_ID),
    "tokenizer.ggml.add_bos_token": (BOOL, False),
    "tokenizer.chat_template": (STRING, CHAT_TEMPLATE),
}


def _tensors() -> dict[str, tuple[tuple[int, ...], list[float]]]:
    """Name -> (shape, values). llama.cpp's shapes: the length of a row comes first."""
    source = random.Random(0)

    def weak(*shape: int) -> tuple[tuple[int, ...], list[float]]:
        return shape, [source.gauss(0, WEAK) for _ in range(shape[0] * shape[1])]

    ones = ((N_EMBD,), [1.0] * N_EMBD)
    tensors = {"token_embd.weight": _embeddings()}
    for layer in range(N_LAYERS):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": ones,
            f"blk.{layer}.attn_q.weight": weak(N_EMBD, N_EMBD),
            f"blk.{layer}.attn_k.weight": weak(N_EMBD, N_EMBD),
            f"blk.{layer}.attn_v.weight": weak(N_EMBD, N_EMBD),
            f"blk.{layer}.attn_output.weight": weak(N_EMBD, N_EMBD),
            f"blk.{layer}.ffn_norm.weight": ones,
            f"blk.{layer}.ffn_gate.weight": weak(N_EMBD, N_FF),
            f"blk.{layer}.ffn_up.weight": weak(N_EMBD, N_FF),
            f"blk.{layer}.ffn_down.weight": weak(N_FF, N_EMBD),
        }
    return tensors | {"output_norm.weight": ones, "output.weight": _output()}


def _embeddings() -> tuple[tuple[int, ...], list[float]]:
    """Direction 0 for all tokens but the words; word number n (from 1) has direction n."""
    rows = [_direction(max(0, token - FIRST_WORD_ID + 1), 1.0) for token in range(len(TOKENS))]
    return (N_EMBD, len(TOKENS)), [value for row in rows for value in row]


def _output() -> tuple[tuple[int, ...], list[float]]:
    """A word follows its predecessor's direction, the first one direction 0; the last ends it."""
    rows = [[0.0] * N_EMBD for _ in TOKENS]
    for number in range(len(WORDS)):
        rows[FIRST_WORD_ID + number] = _direction(number, SURE)
    rows[END_ID] = _direction(len(WORDS), SURE)
    return (N_EMBD, len(TOKENS)), [value for row in rows for value in row]


def _q4_0(values: list[float]) -> tuple[int, bytes]:
    """As quantize_row_q4_0_ref of ggml-quants.c; exact for 0 and the largest value of a block."""
    data = bytearray()
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        scale = max(block, key=abs) / -8
        steps = [min(15, int(value / scale + 8.5)) if scale else 8 for value in block]
        data += struct.pack("<e", scale)
        data += bytes(low | high << 4 for low, high in zip(steps[:16], steps[16:], strict=True))
    return Q4_0, bytes(data)


def _direction(number: int, length: float) -> list[float]:
    return [length if index == number else 0.0 for index in range(N_EMBD)]


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(kind: int, value: Any) -> bytes:
    return struct.pack("<I", kind) + _content(kind, value)


def _content(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        of, items = value
        return struct.pack("<IQ", of, len(items)) + b"".join(_content(of, item) for item in items)
    return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}[kind], value)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
