"""The pages of docs/ and README: their code runs, their links lead somewhere, none is left out.

README's own claims are in test_readme.py.
"""

from __future__ import annotations

import inspect
import pathlib
import re
import subprocess
import sys

import docs_helper as helper
import lohan
import pytest
from lohan import errors

# bash: lines that begin with lohan, all of which are run. text: output, and what is no code of
# lohan's (make, docker, pip). diff: changes to a reader's script. c: a test of tests/c, cited.
LANGUAGES = {"python", "bash", "text", "diff", "c"}
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
RUN = [
    page
    for page in helper.PAGES
    if page.name != "README.md"
    and any(block.language in ("python", "bash") for block in helper.blocks_of(page))
]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: pathlib.Path, store_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store_dir)
    try:
        helper.run_page(page, store_dir)
    finally:
        helper.close_all()


def test_every_block_is_run_or_is_no_code() -> None:
    for page in helper.PAGES:
        for block in helper.blocks_of(page):
            where = f"{page.name}:{block.line}"
            assert block.language in LANGUAGES, f"{where}: {block.language!r}"
            if block.language == "bash":
                for words in block.commands:
                    assert words[0] == "lohan", f"{where}: {words[0]} is not run: that is text"
            elif block.language == "text":
                code = re.search(r"^(lohan |import |from \w+ import )", block.text, re.M)
                assert code is None, f"{where}: {code and code[0]!r} is code that would not run"


def test_every_error_has_its_heading_and_every_heading_is_an_error() -> None:
    page = (helper.ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    found = inspect.getmembers(errors, inspect.isclass)
    public = [name for name, kind in found if issubclass(kind, errors.LohanError)]
    headings = re.findall(r"^### (\w+)$", page, re.M)
    assert sorted(headings) == sorted(public)
    for name in public:
        said = re.search(rf"^### {name}\n+(.+?)(?=^#|\Z)", page, re.M | re.S)
        assert said and len(said[1].split()) >= 15, f"{name}: what it means, and what to do"


def anchors_of(page: pathlib.Path) -> set[str]:
    """Return the anchors of the page's headings."""
    titles = [line.lstrip("#").strip() for line in helper.prose_of(page) if line.startswith("#")]
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower())) for title in titles}


@pytest.mark.parametrize(
    "page",
    [*helper.PAGES, *(helper.ROOT / name for name in ("CONTRIBUTING.md", "benchmarks/README.md"))],
    ids=lambda page: page.stem,
)
def test_every_link_leads_to_a_file_and_a_heading(page: pathlib.Path) -> None:
    for target in LINK.findall("\n".join(helper.prose_of(page))):
        path, _, anchor = target.partition("#")
        if path.startswith(("https://", "mailto:")):
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert there.is_relative_to(helper.ROOT), f"{page.name}: {target} is not in the project"
        if anchor:
            assert anchor in anchors_of(there), f"{page.name}: no heading for {target}"


def test_the_mean_errors_that_are_told_are_those_of_all_rows() -> None:
    """Rows of batch 32 were fitted; the others of both tables were not."""
    page = (helper.ROOT / "docs" / "paper-results.md").read_text(encoding="utf-8")
    row = r"^\| (\d+) \| \d+ \| [\d.]+ \| [\d.]+ \| [+-]([\d.]+)% \|$"
    found = [(batch == "32", float(error)) for batch, error in re.findall(row, page, re.M)]
    fitted, others = (
        [error for is_fitted, error in found if is_fitted is on] for on in (True, False)
    )
    assert (len(fitted), len(others)) == (5, 6)
    means = [f"{sum(errors) / len(errors):.1f} %" for errors in (fitted, others)]
    for name in ("performance.md", "machines.md", "decisions/simulator.md"):
        text = (helper.ROOT / "docs" / name).read_text(encoding="utf-8")
        assert re.search(rf"{means[0]} on the rows.{{,120}}{means[1]}", text, re.S), (name, means)


def test_only_the_creation_of_the_engine_names_features_of_the_page() -> None:
    folder = helper.ROOT / "csrc" / "sched"
    page = (helper.ROOT / "docs" / "internals" / "engine.md").read_text(encoding="utf-8")
    row = re.search(r"^\| features \| (.*?) \|", page, re.M)
    assert row
    features = row[1].split(", ")
    head = (folder / "feature.h").read_text(encoding="utf-8").split("*/")[0]
    assert set(re.findall(r"^ \*      (\w+) .*\.c$", head, re.M)) <= set(features)
    named = "|".join(features)
    use = re.compile(rf"\blh_(?:{named})_\w+\(|(?:->|\.)(?:{named})(?:\.|->)")
    own = re.compile(rf"(?:{named})(?:_calls)?\.c")
    found = []
    for path in sorted(folder.glob("*.c")):
        code = re.sub(r"(?s)/\*.*?\*/", "", path.read_text(encoding="utf-8"))
        if not own.fullmatch(path.name) and use.search(code):
            found.append(path.name)
    assert found == ["create.c"]


def test_the_picture_of_a_step_is_what_its_script_draws() -> None:
    command = [sys.executable, "tools/step_picture.py", "--check"]
    done = subprocess.run(command, cwd=helper.ROOT, check=False)
    assert done.returncode == 0, "run tools/step_picture.py, and commit docs/step.svg"


def test_lists_and_tables_are_some_on_the_site_too() -> None:
    """Python-Markdown needs an empty line between a list and the paragraph or code before it."""
    for page in sorted((helper.ROOT / "docs").rglob("*.md")):
        before = ""
        for number, line in enumerate(helper.prose_of(page), 1):
            begins = re.match(r"([*-]|\d+\.) |\|", line)
            continues = re.match(r"$|([*-]|\d+\.) |\s|#|\|", before)
            assert not begins or continues, f"{page.name}:{number}: an empty line is missing"
            before = line


def test_the_pages_of_the_design_are_short_and_have_a_sentence_per_line() -> None:
    """A diff of such a page shows the sentences that change."""
    first = helper.ROOT / "docs" / "architecture.md"
    assert len(first.read_text(encoding="utf-8").split()) <= 2500
    for page in (first, *sorted((helper.ROOT / "docs" / "internals").glob("*.md"))):
        for number, line in enumerate(helper.prose_of(page), 1):
            second = re.search(r"[.!?][)\"*`]* +[A-Z`\[]", re.sub(r"^ *(\d+\.|\*) ", "", line))
            assert second is None or line.startswith("|"), f"{page.name}:{number}: {line}"


def test_every_public_name_is_in_the_api_reference() -> None:
    page = (helper.ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: lohan\.(?:\w+\.)?(\w+)$", page, re.MULTILINE)
    public = [*lohan.__all__, *lohan._OF_TRAINER]
    of_errors = {"LohanError", "WearBudgetError"}  # in the list of lohan.errors
    missing = set(public) - set(listed) - of_errors - {"__version__", "errors", "losses"}
    assert not missing


def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(
    tmp_path: pathlib.Path,
) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=helper.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    docs = helper.ROOT / "docs"
    for page in docs.rglob("*.md"):
        made = tmp_path / page.relative_to(docs).with_suffix(".html")
        assert made.exists(), page.name
        text = made.read_text(encoding="utf-8")
        loaded = re.findall(
            r"<(?:script|img|link)\b[^>]*\b(?:src|href)=[\"']?(https?:[^\"' >]+)", text
        )
        assert not loaded, f"{page.name} loads {loaded}"
