"""The part of edgellm that runs on an edge host: a small OpenAI-shaped server and its probe.

The process
    __main__             python3 -m edgellm_server: uvicorn, its workers, its socket
    listener             systemd's socket, or one of our own
    connections          uvicorn's HTTP with limits; websocket_protocol: its WebSocket, drained
    hosting              the app (ours or an operator's), with readiness and a watchdog beside it
    lifecycle            what process, connections and app tell each other
    sentinel, notify     a hung process ends; sd_notify
    placement            several workers, each on its own CPUs
    log                  one structured line an event

The app
    app                  routes and what starts them
    config               environment -> ServerConfig
    access               API keys, origins
    request, json_schema bodies -> ChatRequest, CompletionRequest, or ApiError naming the field
    service              engine, state, slots and counts of a process
    slots                admission: so many answers, so many waiting
    answering, websocket request -> answer, over HTTP and over /ws/chat
    stream               chunks and answers in OpenAI's shape; SSE framing
    record, metrics      one request's log line; counts and /metrics
    openapi              the description at /openapi.json
    chat_page.html       the page at /

Engines
    engine               the Engine protocol; LlamaEngine: llama.cpp in this process
    slot_choice          which of llama.cpp's slots a prompt goes to
    forward              ForwardEngine: an OpenAI-compatible server on loopback

By themselves
    probe                stdlib only, imports nothing from here; THE definition of TTFT
    selfcheck            "does this runtime run on this host?", one JSON line

Needs Python >= 3.10 and requirements/host.txt. Never imports `edgellm`.
"""
