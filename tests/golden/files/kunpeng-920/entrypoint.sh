#!/bin/sh
# Rendered by edgellm; the next roll-out replaces it. Change group_data/ or the inventory instead.
# Policy, binding and threads are set here, at exec: set later, they would reach one thread only.
set -eu
here=$(dirname -- "$(readlink -f -- "$0")")
EDGELLM_RELEASE=${here##*/}
PYTHONPATH=$here/runtime
export EDGELLM_RELEASE PYTHONPATH
exec \
    numactl --physcpubind=1-47 --membind=0,1 \
    chrt --batch 0 \
    python3 -s -B -m uvicorn edgellm_server.app:app \
        --host 127.0.0.1 --port 8000 --workers 2 \
        --http h11 --loop asyncio --no-access-log --no-server-header \
        --timeout-graceful-shutdown 10
