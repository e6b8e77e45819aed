"""Every host: the model and its pin, and the settings that are changed most.

Flat scalars only: pyinfra does not merge deeper. All settings, their defaults and allowed values:
edgellm/settings.py. None: the plan decides, from what the host is.
"""

# Qwen2.5-0.5B-Instruct, Apache-2.0, 4 bit. Q4_0 is the fastest on CPUs: llama.cpp repacks it at
# load time for the host's own instructions (docs/tuning.md).
# Another model: python -m edgellm.model_source pin SOURCE prints these four lines.
model_name = "qwen2.5-0.5b-instruct-q4_0"
model_source = (
    "hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF/qwen2.5-0.5b-instruct-q4_0.gguf"
    "@9217f5db79a29953eb74d5343926648285ec7e67"
)
model_sha256 = "7671c0c304e6ce5a7fc577bcb12aba01e2c155cc2efd29b2213c95b18edaf6ed"
model_size_bytes = 428_730_208

# Server. Another address than loopback needs api_key_env.
bind_address = "127.0.0.1"
port = 8000
api_key_env = None  # "EDGELLM_API_KEY": the variable of the control machine; "A,B": several keys
web_ui = True  # the chat page at /
cors_origins = None  # "https://panel.example": pages of other origins that may call the server
log_prompts = False  # prompts and answers in the journal
drain_deadline_s = 30  # what running answers get to end in, at a stop or a switch of releases
system_prompt = None  # prefilled at start: its tokens cost nothing at the first request
n_ctx = 2048  # tokens of one slot; about 12 KB of memory a token for this model
n_parallel = None  # slots
max_tokens = 512  # generated, a request
max_queue = 8  # requests waiting beyond the slots; further ones get 503 and Retry-After

# An OpenAI-compatible server of your own that runs on the hosts (llama-server, vLLM, TGI, Ollama):
# engine = "forward" sends no model and passes requests on to it.
engine = "llama"
upstream_url = None  # "http://127.0.0.1:8080/v1"
upstream_unit = None  # "llama-server.service": it gets the tuning too, by a drop-in

# An ASGI app of your own in the place of ours, with /health and /v1/chat/completions.
server_app = None  # "main:app"
server_app_dir = None  # "my_app": a folder of this clone, sent with each release

# Tuning
threads = None
workers = None
scheduling = "batch"
cpu_weight = 1000  # of edgellm.slice, against 100 of everything else: the lever under load
reserve_cpus = False  # True: system.slice and user.slice keep off the server's cores
cpu_governor = None  # "performance": of all cores, at boot and now; None: as it is
swappiness = None
zram = "auto"

# When a host counts as healthy
ttft_budget_ms = 1500  # median of smoke_requests
ttft_regression_percent = 50  # over the host's own last good run; None: not compared
smoke_requests = 5
verify_from = "host"  # "control": from the control machine as well, through the ssh connection
load_deadline_s = 180  # from start to ready
transfer_deadline_s = 3600  # one file: 430 MB at 1 Mbit/s take an hour
