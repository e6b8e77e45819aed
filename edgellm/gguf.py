"""The header of a GGUF file, read within bounds: what a model says it is, before it goes anywhere.

Format: ggml-org/ggml docs/gguf.md. Little-endian, versions 2 and 3.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

from edgellm.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)

# Bounds for hostile or damaged files. Largest seen: Gemma 3's header, 262,144 tokens, about 15 MB.
MAX_HEADER_BYTES = 64 << 20
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1  # docs/gguf.md
MAX_TEXT_BYTES = 1 << 20  # chat templates have tens of KB

# Type numbers of docs/gguf.md: gguf_metadata_value_type
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}

# llama.cpp's architectures (src/llama-arch.cpp) that are decoder-only text models its server can
# chat with; each is in xllamacpp 2026.10.11549. Left out: encoders (bert, nomic-bert, t5encoder),
# diffusion, projectors (clip), speech (wavtokenizer-dec).
TEXT_CHAT_ARCHITECTURES = frozenset(
    {
        "llama",  # also SmolLM and SmolLM2, TinyLlama, Mistral
        "llama4",
        "qwen2",  # also Qwen2.5
        "qwen2moe",
        "qwen3",
        "qwen3moe",
        "qwen3next",
        "qwen35",
        "gpt-oss",
        "mistral3",
        "bitnet",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3n",
        "phi2",
        "phi3",
        "phimoe",
        "smollm3",
        "granite",
        "granitemoe",
        "granitehybrid",
        "falcon-h1",
        "lfm2",
        "lfm2moe",
        "olmo",
        "olmo2",
        "olmoe",
        "stablelm",
        "minicpm",
        "minicpm3",
        "internlm2",
        "exaone",
        "exaone4",
        "chatglm",
        "glm4",
        "ernie4_5",
        "hunyuan-dense",
        "deepseek2",
        "starcoder2",
        "command-r",
        "cohere2",
        "mamba",
        "mamba2",
        "rwkv6",
        "rwkv7",
    }
)

# llama.h: enum llama_ftype, the ones met on edge boxes
_FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    12: "Q3_K_M",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    25: "IQ4_NL",
    30: "IQ4_XS",
    32: "BF16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a GGUF file says of itself. None: it does not say."""

    version: int  # 3
    architecture: str | None  # "qwen2"
    kind: str | None  # general.type: "model"; "adapter" and "mmproj" are not servable alone
    name: str | None  # "qwen2.5-0.5b-instruct"
    n_tensors: int  # 291
    file_type: int | None  # llama_ftype: 2 is Q4_0
    n_ctx_train: int | None  # 32768
    block_count: int | None  # 24
    split_count: int  # 1: the whole model is in this file
    has_chat_template: bool

    @property
    def quantization(self) -> str | None:
        """'Q4_0' for file_type 2; None for a number without a name here."""
        return None if self.file_type is None else _FILE_TYPES.get(self.file_type)


def read_gguf_header(file: BinaryIO) -> GgufHeader:
    """An open binary file, at its start -> GgufHeader. Reads the header alone, not the weights.

    Raises ModelError for all that is not a GGUF header: other magic, unknown version, cut short,
    counts or lengths beyond all sense.
    """
    reader = _Reader(file)
    magic = reader.take(4, "the magic")
    if magic != MAGIC:
        raise _not_gguf(f"first bytes {magic!r}")
    version = reader.u32("the version")
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise _not_gguf("a big-endian file, made for s390x", "take the little-endian file")
        raise _not_gguf(f"version {version}", "convert the model anew with a current llama.cpp")
    n_tensors = reader.count(MAX_TENSORS, "the number of tensors")
    n_pairs = reader.count(MAX_PAIRS, "the number of metadata entries")
    pairs: dict[str, object] = {}
    for _ in range(n_pairs):
        key = reader.text(MAX_KEY_BYTES, "a metadata key")
        pairs[key] = reader.value(reader.u32(f"the type of {key}"), key)
    architecture = _text(pairs, "general.architecture")
    return GgufHeader(
        version=version,
        architecture=architecture,
        kind=_text(pairs, "general.type"),
        name=_text(pairs, "general.name"),
        n_tensors=n_tensors,
        file_type=_whole(pairs, "general.file_type"),
        n_ctx_train=_whole(pairs, f"{architecture}.context_length"),
        block_count=_whole(pairs, f"{architecture}.block_count"),
        split_count=_whole(pairs, "split.count") or 1,
        has_chat_template=bool(_text(pairs, "tokenizer.chat_template")),
    )


def check_servable(header: GgufHeader) -> None:
    """Raises ModelError where llama.cpp's server could not chat with this file by itself."""
    if header.split_count > 1:
        raise ModelError(
            what="model file",
            want="the whole model in one file",
            have=f"one of {header.split_count} parts",
            fix="merge the parts with llama-gguf-split --merge, or take a model in one file",
        )
    if header.kind not in (None, "model"):
        raise ModelError(
            what="model file",
            want="a model",
            have=f"general.type={_shown(header.kind or '')}, which cannot answer alone",
            fix="take the model's own .gguf from the same repository",
        )
    if header.architecture not in TEXT_CHAT_ARCHITECTURES:
        raise ModelError(
            what="model file",
            want="a text chat model that llama.cpp's server runs (qwen2, qwen3, llama, gemma3, …)",
            have="no general.architecture"
            if header.architecture is None
            else f"general.architecture={_shown(header.architecture)}",
            fix="take an instruct model in GGUF; "
            "the list is TEXT_CHAT_ARCHITECTURES in edgellm/gguf.py",
        )
    if header.n_tensors == 0:
        raise ModelError(
            what="model file",
            want="weights",
            have="no tensors: a vocabulary alone",
            fix="take the model's own .gguf from the same repository",
        )


class _Reader:
    """Reads forward, never past MAX_HEADER_BYTES, and never more at once than a bound allows."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._left = MAX_HEADER_BYTES

    def take(self, size: int, what: str) -> bytes:
        self._check_bound(size, what)
        data = self._file.read(size)
        self._left -= size
        if len(data) != size:
            raise _not_gguf(f"a file that ends inside its header, at {what}", _FETCH_AGAIN)
        return data

    def _check_bound(self, size: int, what: str) -> None:
        if size > self._left:
            raise _not_gguf(f"a header over {MAX_HEADER_BYTES >> 20} MiB, at {what}", _FETCH_AGAIN)

    def skip(self, size: int, what: str) -> None:
        self._check_bound(size, what)
        while size > 0:
            size -= len(self.take(min(size, 1 << 20), what))

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def count(self, limit: int, what: str) -> int:
        count = int.from_bytes(self.take(8, what), "little")
        if count > limit:
            raise _not_gguf(f"{what} = {count}, over {limit}", _FETCH_AGAIN)
        return count

    def text(self, limit: int, what: str) -> str:
        return self.take(self.count(limit, f"the length of {what}"), what).decode(
            "utf-8", errors="replace"
        )

    def value(self, kind: int, key: str) -> object:
        """A scalar or a text; None for an array, which is skipped."""
        if kind == _STRING:
            return self.text(MAX_TEXT_BYTES, _shown(key))
        if kind == _ARRAY:
            self._skip_array(key)
            return None
        if kind not in _SCALARS:
            raise _not_gguf(f"value type {kind} at {_shown(key)}", _FETCH_AGAIN)
        layout = _SCALARS[kind]
        value: object = struct.unpack(layout, self.take(struct.calcsize(layout), _shown(key)))[0]
        return value

    def _skip_array(self, key: str) -> None:
        kind = self.u32(f"the element type of {_shown(key)}")
        count = self.count(MAX_HEADER_BYTES, f"the length of {_shown(key)}")
        if kind in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[kind]), _shown(key))
        elif kind == _STRING:
            for _ in range(count):
                self.skip(self.count(MAX_TEXT_BYTES, f"a text of {_shown(key)}"), _shown(key))
        else:  # arrays of arrays: in the format, in no model, refused by llama.cpp as well
            raise _not_gguf(f"an array of type {kind} at {_shown(key)}", _FETCH_AGAIN)


_FETCH_AGAIN = "fetch it again from its publisher: the file is damaged"


def _not_gguf(have: str, fix: str = "point model_source at a .gguf file") -> ModelError:
    return ModelError(
        what="model file", want="a GGUF file of version 2 or 3, little-endian", have=have, fix=fix
    )


def _shown(text: str) -> str:
    """Text out of a foreign file, fit for one line of an error."""
    return ascii(text[:60])[1:-1] + ("…" if len(text) > 60 else "")


def _text(pairs: dict[str, object], key: str) -> str | None:
    value = pairs.get(key)
    return value if isinstance(value, str) else None


def _whole(pairs: dict[str, object], key: str) -> int | None:
    value = pairs.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
