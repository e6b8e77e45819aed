"""The part of edgellm that runs on an edge host: a small OpenAI-shaped server and its probe.

config.py     environment -> ServerConfig
request.py    body of POST /v1/chat/completions -> ChatRequest, or ApiError naming the field
engine.py     Engine protocol; LlamaEngine: llama.cpp in this process
stream.py     chunks and answers in OpenAI's shape; SSE framing
app.py        the ASGI app: uvicorn edgellm_server.app:app
probe.py      stdlib only, imports nothing from here; THE definition of TTFT
selfcheck.py  "does this runtime run on this host?", one JSON line

Needs Python >= 3.10, xllamacpp, uvicorn (h11, asyncio), starlette. Never imports `edgellm`.
"""
