"""The GGUF header: read within bounds, refused with a reason."""

from __future__ import annotations

import contextlib
import io
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import ModelError
from edgellm.gguf import GgufHeader, check_servable, read_gguf_header

STRING, ARRAY, UINT32, BOOL = 8, 9, 4, 7


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def gguf(
    *pairs: bytes, version: int = 3, n_tensors: int = 291, n_pairs: int | None = None
) -> bytes:
    count = len(pairs) if n_pairs is None else n_pairs
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, count) + b"".join(pairs)


QWEN = (
    pair("general.architecture", STRING, text("qwen2")),
    pair("general.type", STRING, text("model")),
    pair("general.name", STRING, text("qwen2.5-0.5b-instruct")),
    pair("qwen2.block_count", UINT32, struct.pack("<I", 24)),
    pair("qwen2.context_length", UINT32, struct.pack("<I", 32768)),
    pair("general.file_type", UINT32, struct.pack("<I", 2)),
    pair("tokenizer.ggml.add_bos_token", BOOL, b"\x00"),
    pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 2) + text("!") + text("Ġthe")),
    pair("tokenizer.ggml.token_type", ARRAY, struct.pack("<IQ2i", 5, 2, 1, 1)),
    pair("tokenizer.chat_template", STRING, text("{% for message in messages %}")),
)


def read(data: bytes) -> GgufHeader:
    return read_gguf_header(io.BytesIO(data))


def test_a_qwen_header_reads_as_what_the_model_is() -> None:
    header = read(gguf(*QWEN) + b"tensor infos and weights follow")
    assert header == GgufHeader(
        version=3,
        architecture="qwen2",
        kind="model",
        name="qwen2.5-0.5b-instruct",
        n_tensors=291,
        file_type=2,
        n_ctx_train=32768,
        block_count=24,
        split_count=1,
        has_chat_template=True,
    )
    assert header.quantization == "Q4_0"
    check_servable(header)


def test_a_header_that_says_nothing_of_itself_reads_as_none() -> None:
    header = read(gguf())
    assert (header.architecture, header.file_type, header.quantization) == (None, None, None)


def test_version_2_reads_as_well() -> None:
    assert read(gguf(*QWEN, version=2)).version == 2


LONG_ARRAY = ARRAY, struct.pack("<IQ", STRING, 1 << 40)
NESTED = ARRAY, struct.pack("<IQIQ", ARRAY, 1, UINT32, 0)


@pytest.mark.parametrize(
    ("data", "have"),
    [
        (b"", "have a file that ends inside its header, at the magic"),
        (b"PK\x03\x04" + b"\0" * 60, r"have first bytes b'PK\x03\x04'"),
        (gguf(version=1), "have version 1; fix: convert the model anew"),
        (gguf(version=3 << 24), "have a big-endian file, made for s390x"),
        (gguf(n_tensors=1 << 63), "have the number of tensors = 9223372036854775808, over 65536"),
        (gguf(n_pairs=1 << 32), "have the number of metadata entries = 4294967296, over 65536"),
        (gguf(*QWEN, n_pairs=11), "ends inside its header, at the length of a metadata key"),
        (gguf(*QWEN)[:66], "ends inside its header, at general.architecture"),
        (gguf(pair("x", STRING, struct.pack("<Q", 1 << 62))), "have the length of x = 46116860"),
        (
            gguf(struct.pack("<Q", 1 << 20)),
            "have the length of a metadata key = 1048576, over 65535",
        ),
        (gguf(pair("x", 77, b"")), "have value type 77 at x"),
        (gguf(pair("x", *LONG_ARRAY)), "have the length of x = 1099511627776, over"),
        (gguf(pair("x", *NESTED)), "have an array of type 9 at x"),
        (gguf(pair("x", ARRAY, struct.pack("<IQ", 10, 1 << 26))), "a header over 64 MiB, at x"),
        (gguf(pair("\x1b[2J\n", 77, b"")), r"have value type 77 at \x1b[2J\n; fix"),
    ],
)
def test_what_is_no_header_is_refused_with_its_reason(data: bytes, have: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(data)
    assert have in str(caught.value)


@pytest.mark.parametrize(
    ("header", "have"),
    [
        (
            gguf(pair("general.architecture", STRING, text("bert"))),
            "have general.architecture=bert; fix: take an instruct model",
        ),
        (gguf(), "have no general.architecture"),
        (
            gguf(*QWEN[:1], pair("general.type", STRING, text("mmproj"))),
            "have general.type=mmproj, which cannot answer alone",
        ),
        (
            gguf(*QWEN, pair("split.count", 2, struct.pack("<H", 3))),
            "have one of 3 parts; fix: merge the parts with llama-gguf-split --merge",
        ),
        (gguf(*QWEN, n_tensors=0), "have no tensors: a vocabulary alone"),
    ],
)
def test_a_model_that_cannot_chat_is_refused_with_its_reason(header: bytes, have: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_servable(read(header))
    assert have in str(caught.value)


def test_an_array_as_long_as_the_bounds_allow_is_left_within_seconds() -> None:
    bomb = gguf(pair("x", ARRAY, struct.pack("<IQ", STRING, 1 << 26) + b"\0" * (2 << 20)))
    start = time.monotonic()
    with pytest.raises(ModelError, match="ends inside its header"):
        read(bomb)
    assert time.monotonic() - start < 2


@given(st.binary(max_size=400))
def test_garbage_after_the_magic_raises_nothing_but_model_error(data: bytes) -> None:
    with contextlib.suppress(ModelError):
        read(b"GGUF\x03\x00\x00\x00" + data)


@given(st.integers(min_value=0, max_value=len(gguf(*QWEN)) - 1), st.integers(0, 255))
def test_a_damaged_header_raises_nothing_but_model_error(position: int, byte: int) -> None:
    data = bytearray(gguf(*QWEN))
    data[position] = byte
    with contextlib.suppress(ModelError):
        check_servable(read(bytes(data)))
