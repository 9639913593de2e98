#!/usr/bin/env bash
# This script makes an environment with a framework that lohan is tested with, in a folder of its
# own: each pins versions of transformers and other libraries that differ from those of .venv. The
# packages of tools/requirements-NAME.txt take precedence in it, and .venv has the others (torch,
# pytest), so `make build` comes first. A second run installs only what is missing.
#
# The frameworks' own dependencies are not installed as a whole, because they include CUDA's
# libraries, cloud storage and web interfaces, which the tests do not need.
#
# Usage: tools/setup_framework.sh axolotl|llamafactory|swift FOLDER
set -euo pipefail
requirements="$(dirname "$0")/requirements-${1:-}.txt"
if [ "$#" -ne 2 ] || [ ! -e "$requirements" ]; then
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 2
fi
root="$(cd "$(dirname "$0")/.." && pwd)"
base="$root/.venv"
if [ ! -x "$base/bin/python" ]; then
    echo "setup: $base is missing: make build"
    exit 1
fi
if [ ! -x "$2/bin/python" ]; then
    "$base/bin/python" -m venv --without-pip "$2"
fi
here="$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
# Python does not read the .pth files of a folder that a .pth file names, such as lohan's own.
printf '%s\n' "$root/python" \
    "$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    >"$here/zz_base.pth"

echo "setup: installing $requirements into $2"
"$base/bin/python" -m pip --python "$2/bin/python" install --quiet --disable-pip-version-check \
    --no-compile --no-deps -r "$requirements"
# PyPI has torchaudio for CUDA only. LLaMA-Factory imports it for data with sounds; without its
# libraries it is imported as a package of Python, also beside a torch without CUDA.
if ! "$2/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    rm -f "$here"/torchaudio/lib/*.so
fi
