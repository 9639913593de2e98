#!/usr/bin/env bash
# Without a network, the Hugging Face Hub's client waits 23 seconds for a file that it lacks.
#
# Guess: where nothing listens at the Hub's address, a download fails at once, as a refused
# connection does, and from_pretrained(NAME) says so.
# Seen with huggingface_hub 2.4.0: hf_hub_download() of a file that is not in the cache asks six
# times, with pauses of 1, 2, 4, 8 and 8 seconds, and raises LocalEntryNotFoundError after 23 seconds.
# Of a file in the cache the same call returns at once. HF_HUB_OFFLINE=1 makes both fast.
# What follows: a mistyped name, or an optional file of a model, costs a machine without a network
# half a minute each; look into the cache first (try_to_load_from_cache), or set HF_HUB_OFFLINE.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check huggingface_hub==2.4.0
cd "$folder"
cat >one.py <<'PYTHON'
import os
import pathlib
import time

import huggingface_hub

repository = pathlib.Path(os.environ["HF_HOME"], "hub", "models--owner--name")
snapshot = repository / "snapshots" / ("0" * 40)
snapshot.mkdir(parents=True, exist_ok=True)
(snapshot / "config.json").write_text("{}")
(repository / "refs").mkdir(exist_ok=True)
(repository / "refs" / "main").write_text("0" * 40)
found = {}
for file in ("config.json", "absent.json"):
    start = time.monotonic()
    try:
        huggingface_hub.hf_hub_download("owner/name", file)
        how = "found"
    except huggingface_hub.errors.LocalEntryNotFoundError:
        how = "absent"
    found[file] = how, time.monotonic() - start
print(huggingface_hub.__version__, {file: (how, round(s, 1)) for file, (how, s) in found.items()})
how, seconds = found["config.json"]
assert how == "found" and seconds < 5, found
how, seconds = found["absent.json"]
is_offline = os.environ.get("HF_HUB_OFFLINE") == "1"
assert how == "absent" and (seconds < 5 if is_offline else seconds > 20), found
PYTHON
# A port of this machine on which nothing listens stands for the Hub.
export HF_ENDPOINT=http://127.0.0.1:9 HF_HOME="$folder/hf"
venv/bin/python one.py 2>retries
test "$(grep -c Retrying retries)" = 5
HF_HUB_OFFLINE=1 venv/bin/python one.py
