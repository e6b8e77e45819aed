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
# Real time only where a roll-out has confirmed this release, or is just trying it: a host that hung
# and was switched off and on comes back with a policy that cannot hang it.
set -- chrt --batch 0
for file in /opt/edgellm/realtime-confirmed /run/edgellm-realtime-trial; do
    release=
    if [ -r "$file" ]; then read -r release <"$file" || true; fi
    if [ "$release" = "$EDGELLM_RELEASE" ]; then
        set -- chrt --fifo 10
    fi
done
exec \
    "$@" \
    python3 -s -B -m edgellm_server
