#!/bin/bash
# Hold h1 of PlexRL partition rlvr: keeps one agent running.
# The agent ends with 0 only when the hold is given back; after any other end it is started again.
trap 'trap - TERM; kill -TERM "$child" 2>/dev/null; wait "$child"; exit 143' TERM
while true; do
    /opt/plexrl/bin/python -m plexrl_slurm.daemons.agentd '/var/lib/plexrl/a folder/h1.json' &
    child=$!
    wait "$child"
    code=$?
    [ "$code" -eq 0 ] && exit 0
    echo "agent ended with $code; starting it again" >&2
    sleep 0.5
done
