"""python requantise.py SOURCE TARGET: a GGUF's matrices as Q4_0, but its output.

Run by the common way's Python, which has the gguf package. Embeddings and blocks of llama.cpp's
own Q4_0 files are Q4_0, an untied output of 896 columns is Q8_0: what the published file has.
"""

from __future__ import annotations

import sys

from gguf import (  # type: ignore[import-not-found,unused-ignore]
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    quants,
)

FILE_TYPE_MOSTLY_Q4_0 = 2  # llama.h, LLAMA_FTYPE_MOSTLY_Q4_0
KEPT = ("output.weight",)


def requantise(source: str, target: str) -> None:
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        # The writer makes these itself.
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        of = field.types[-1] if kind == GGUFValueType.ARRAY else None
        is_type = field.name == "general.file_type"
        value = FILE_TYPE_MOSTLY_Q4_0 if is_type else field.contents()
        writer.add_key_value(field.name, value, kind, sub_type=of)
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        if kind == GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, tensor.data)
        elif tensor.name in KEPT:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=kind)
        else:
            floats = quants.dequantize(tensor.data, kind)
            packed = quants.quantize(floats, GGMLQuantizationType.Q4_0)
            writer.add_tensor(tensor.name, packed, raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    requantise(*sys.argv[1:])
