#!/usr/bin/env bash
# This script makes .venv with everything that the tests need, on a machine that has only Python.
#
# It installs missing system packages with apt-get, as root or through sudo. Where that is not
# possible, it prints what is missing and continues: only a C compiler and Python's headers are
# indispensable, and the build reports them if they are missing.
#
# Usage: tools/setup_dev.sh [FOLDER]      (default .venv)
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${1:-.venv}"

say() { printf 'setup: %s\n' "$*"; }

apt_install() {
    local as_root=()
    if ! command -v apt-get >/dev/null; then
        say "missing: $* (this machine has no apt-get: install them with your package manager); continuing"
        return 1
    fi
    if [ "$(id -u)" -ne 0 ]; then
        if ! command -v sudo >/dev/null; then
            say "missing: $* (you are not root and there is no sudo: ask an administrator to run 'apt-get install $*'); continuing"
            return 1
        fi
        as_root=(sudo)
    fi
    say "apt-get install $*"
    "${as_root[@]}" apt-get update -qq || say "apt-get update failed; using the existing package lists"
    # Install the packages one by one if that fails, so that one unknown name does not stop the others.
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null && return 0
    local package failed=0
    for package in "$@"; do
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" \
            >/dev/null || { say "could not install $package; continuing"; failed=1; }
    done
    return $failed
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local name
    for name in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null && new_enough "$name"; then
            command -v "$name"
            return 0
        fi
    done
    return 1
}

python="$(find_python || true)"
if [ -z "$python" ]; then
    say "no Python 3.11 or newer found"
    apt_install python3.11 python3.11-venv python3.11-dev || apt_install python3 || true
    python="$(find_python)" || { say "lohan needs Python 3.11 or newer"; exit 1; }
fi

# Debian's packages of a Python are named after its version; other Pythons include these parts.
version="$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
missing=()
command -v cc >/dev/null || command -v gcc >/dev/null || missing+=(gcc libc6-dev)
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("$version-venv")
"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' \
    || missing+=("$version-dev")
[ -e /usr/include/liburing.h ] || missing+=(liburing-dev)
[ -e /usr/include/libaio.h ] || missing+=(libaio-dev)
# Tests of several nodes make network namespaces, which only root may do; without these programs
# they are skipped.
if [ "$(id -u)" -eq 0 ]; then
    command -v ip >/dev/null || missing+=(iproute2)
    command -v nft >/dev/null || missing+=(nftables)
fi
if [ "${#missing[@]}" -gt 0 ]; then
    apt_install "${missing[@]}" || true
fi

if [ ! -x "$venv/bin/python" ]; then
    say "making $venv with $python"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
say "installing requirements-dev.txt"
# --no-compile: only few of the thousands of modules are ever imported; Python compiles those then.
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
if ! "${pip[@]}" -r requirements-dev.txt; then
    say "that failed; trying again with the index of PyTorch's CPU builds"
    "${pip[@]}" -r requirements-dev.txt --extra-index-url https://download.pytorch.org/whl/cpu
fi
say "done"
