#!/usr/bin/env bash
# Run several commands at the same time: see usage below.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/beside.sh COMMAND [COMMAND...]

Runs each COMMAND (a line for bash) at the same time. What the first says is seen as it comes, what
each other says once it and all before it have ended. Exits 0 if all did. Ctrl-C interrupts all and
waits until they have cleaned up, a second one ends them at once.
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; "") usage >&2; exit 64 ;; esac
LOGS=$(mktemp -d)
groups=()

signal() { # NAME: to everything that still runs
    local group
    for group in "${groups[@]}"; do kill "-$1" -- "-$group" 2>/dev/null || true; done
}

stop() { # tests stop the servers and clusters that they started when they are interrupted
    trap 'signal KILL' INT TERM HUP
    signal INT
    while signal 0 && wait -n; do :; done
    wait || true
    signal KILL
    rm -rf "$LOGS"
    exit 130
}
trap stop INT TERM HUP

set -m # a process group each, which can be interrupted whole
for command; do
    if ((${#groups[@]})); then
        bash -c "$command" </dev/null >"$LOGS/${#groups[@]}" 2>&1 &
    else
        bash -c "$command" </dev/null &
    fi
    groups+=("$!")
done
set +m

status=0
for number in "${!groups[@]}"; do
    ended=0
    wait "${groups[number]}" || ended=$?
    if ((number)); then
        printf '\n---- %s\n' "${@:number + 1:1}"
        cat "$LOGS/$number"
    fi
    ((!ended)) || { status=1; printf -- '---- exit %d: %s\n' "$ended" "${@:number + 1:1}" >&2; }
done
rm -rf "$LOGS"
exit "$status"
