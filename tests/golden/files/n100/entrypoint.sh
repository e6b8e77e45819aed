#!/bin/sh
# Rendered by edgellm; the next roll-out replaces it. Change group_data/ or the inventory instead.
# Policy, binding and threads are set here, at exec: set later, they would reach one thread only.
# `-m edgellm_server` is uvicorn with its workers, started by a launcher of ours: on systemd's
# socket, with READY and WATCHDOG, and with a deadline for a request's head. server.env has the rest.
set -eu
here=$(dirname -- "$(readlink -f -- "$0")")
EDGELLM_RELEASE=${here##*/}
PYTHONPATH=$here/runtime
export EDGELLM_RELEASE PYTHONPATH
exec \
    chrt --batch 0 \
    python3 -s -B -m edgellm_server
