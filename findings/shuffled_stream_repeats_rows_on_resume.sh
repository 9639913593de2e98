#!/usr/bin/env bash
# A shuffled stream of datasets that is resumed from its state yields rows for a second time.
#
# Guess: the state of an IterableDataset with shuffle(buffer_size=) leaves out the rows that were in
# the buffer, as the documentation of state_dict() says ("examples from shuffle buffers are lost when
# resuming"), and every other row comes once.
# Seen with datasets 5.2.0: of 12 rows in 3 shards with a buffer of 4, a stream that has yielded 4 rows
# and is resumed from the state at that point yields row 5 again, which was among those 4, and never
# yields rows 0, 9 and 10. A log line says that the buffer will be refilled; it names no repetition.
# What follows: shuffle a stream that is to be resumed by rows in a map-style dataset, or skip the rows
# that were trained on by their identity.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import datasets


def stream():
    rows = datasets.Dataset.from_dict({"row": list(range(12))})
    return rows.to_iterable_dataset(num_shards=3).shuffle(seed=0, buffer_size=4)


found = {}
for count in range(12):
    dataset = stream()
    rows = iter(dataset)
    first = [next(rows)["row"] for _ in range(count)]
    state = dataset.state_dict()
    resumed = stream()
    resumed.load_state_dict(state)
    rest = [example["row"] for example in resumed]
    found[count] = sorted(set(first) & set(rest)), sorted(set(range(12)) - {*first, *rest})
    print(count, "rows, then resumed: twice", found[count][0], "never", found[count][1])
print("datasets", datasets.__version__)
assert all(found[count] == ([], []) for count in range(4)), found
assert found[4] == ([5], [0, 9, 10]), found
assert found[9] == ([11], [3, 7, 10]), found
PYTHON
