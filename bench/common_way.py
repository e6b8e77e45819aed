"""The common way, as the field's blogs show it: FastAPI and transformers behind plain uvicorn.

    MODEL_DIR=… GGUF_FILE=… uvicorn common_way:app

Fair to it: weights read once, eval mode, inference without gradients, KV cache, torch's own thread
count, `def` endpoints (uvicorn's event loop stays free), tokens streamed as they come. Its answers
have OpenAI's chunk shape, so that one stopwatch times both servers. Runs in a venv of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from threading import Thread
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
from fastapi import FastAPI  # type: ignore[import-not-found,unused-ignore]
from fastapi.responses import (  # type: ignore[import-not-found,unused-ignore]
    StreamingResponse,
)
from pydantic import BaseModel
from transformers import (  # type: ignore[import-not-found,unused-ignore]
    AutoModelForCausalLM,
    AutoTokenizer,
    TextIteratorStreamer,
)

MODEL_DIR = os.environ["MODEL_DIR"]
GGUF_FILE = os.environ["GGUF_FILE"]

tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, gguf_file=GGUF_FILE)
model = AutoModelForCausalLM.from_pretrained(
    MODEL_DIR, gguf_file=GGUF_FILE, dtype=torch.float32
).eval()

app = FastAPI()


class ChatRequest(BaseModel):
    model: str = "common-way"
    messages: list[dict[str, str]]
    max_tokens: int = 64
    temperature: float = 0.0
    stream: bool = True


@app.get("/health")  # type: ignore[untyped-decorator,unused-ignore]
def health() -> dict[str, str]:
    return {"state": "ready"}


@app.post("/v1/chat/completions")  # type: ignore[untyped-decorator,unused-ignore]
def chat_completions(request: ChatRequest) -> StreamingResponse:
    return StreamingResponse(answer(request), media_type="text/event-stream")


def answer(request: ChatRequest) -> Iterator[str]:
    inputs = tokenizer.apply_chat_template(
        request.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": request.temperature}
        if request.temperature > 0
        else {"do_sample": False}
    )
    arguments = {
        **inputs,
        **sampling,
        "max_new_tokens": request.max_tokens,
        "use_cache": True,
        "streamer": streamer,
    }
    generated: list[torch.Tensor] = []
    thread = Thread(target=lambda: generated.append(generate(**arguments)))
    thread.start()
    for text in streamer:
        yield event([{"index": 0, "delta": {"content": text}, "finish_reason": None}])
    thread.join()
    yield event([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    prompt_tokens = inputs["input_ids"].shape[1]
    completion_tokens = generated[0].shape[1] - prompt_tokens
    yield event([], usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})
    yield "data: [DONE]\n\n"


@torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
def generate(**arguments: Any) -> torch.Tensor:
    return model.generate(**arguments)


def event(choices: list[dict[str, Any]], **more: Any) -> str:
    chunk = {"object": "chat.completion.chunk", "choices": choices, **more}
    return f"data: {json.dumps(chunk)}\n\n"
