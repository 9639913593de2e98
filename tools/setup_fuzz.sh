#!/usr/bin/env bash
# This script installs what the C targets of tests/run.py fuzz need: clang with libFuzzer, and
# llvm-cov. It uses apt-get, as root or through sudo.
set -euo pipefail

probe=$(mktemp -d)
trap 'rm -rf "$probe"' EXIT
printf 'int LLVMFuzzerTestOneInput(const char *d, long n) { return d && n < 0; }\n' >"$probe/probe.c"
if command -v llvm-cov >/dev/null && command -v llvm-profdata >/dev/null &&
    clang -fsanitize=fuzzer "$probe/probe.c" -o "$probe/probe" 2>/dev/null; then
    exit 0
fi

as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
printf 'setup: apt-get install clang llvm and the runtime of the sanitizers\n'
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends clang llvm >/dev/null
# libFuzzer is a part of the sanitizers' runtime, whose package is named after clang's version.
version=$(clang -dumpversion | cut -d. -f1)
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "libclang-rt-$version-dev" >/dev/null
