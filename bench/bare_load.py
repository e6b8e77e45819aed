"""python -m bench.bare_load: nothing but xllamacpp's Server() with our server's parameters.

What a start cannot be quicker than. Prints "loaded" and waits for the end of its input.
"""

from __future__ import annotations

import os
import sys

import xllamacpp


def load() -> object:
    environ = os.environ
    n_parallel = int(environ["EDGELLM_N_PARALLEL"])
    params = xllamacpp.CommonParams()
    params.model.path = environ["EDGELLM_MODEL_PATH"]
    params.n_parallel = n_parallel
    params.n_ctx = int(environ["EDGELLM_N_CTX"]) * n_parallel
    params.n_batch = params.n_ubatch = int(environ["EDGELLM_N_BATCH"])
    params.cpuparams.n_threads = int(environ["EDGELLM_N_THREADS"])
    params.cpuparams_batch.n_threads = int(environ["EDGELLM_N_THREADS_BATCH"])
    params.cache_ram_mib = int(environ["EDGELLM_CACHE_RAM_MIB"])
    params.fit_params = False
    params.warmup = False
    if environ["EDGELLM_MLOCK"] == "1":
        params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP_MLOCK
    params.verbosity = 1
    return xllamacpp.Server(params)


if __name__ == "__main__":
    server = load()
    print("loaded", flush=True)
    sys.stdin.read()
    os._exit(0)
