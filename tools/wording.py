"""Find phrases that docs/style.md (Words) replaces by plainer ones.

    python tools/wording.py [--count] [FILE...]

Without FILE, search Markdown files, the comments and strings of C, CUDA and Python, and all the
text of shell scripts, .ci/run, Makefile and configuration files. The exit status is 1 if any phrase
was found.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import pathlib
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import cbuild

ROOT = pathlib.Path(__file__).resolve().parent.parent
STYLE = ROOT / "docs" / "style.md"
CODE = "\0"  # in the place of a character of code, so that no phrase is found across it
C_TEXT = re.compile(
    r'/\*(?P<block>.*?)\*/|//(?P<line>[^\n]*)|"(?P<string>(?:\\.|[^"\\\n])*)"'
    r"|'(?:\\.|[^'\\\n])+'|[^/\"']+|.",
    re.S,
)
# What surrounds the text of a Python string or comment.
FRAME = re.compile(r"""^(#+|[A-Za-z]{0,2}("{3}|'{3}|["']))|("{3}|'{3}|["'])$""")
MARKDOWN_CODE = re.compile(r"^```.*?^```|``.+?``|`[^`\n]+`|\]\([^)\n]*\)", re.S | re.M)


@dataclasses.dataclass(frozen=True)
class Phrase:
    """A phrase of the table, and what to write instead."""

    words: str
    instead: str
    exceptions: tuple[re.Pattern[str], ...]

    def places(self, text: str) -> Iterator[int]:
        """Yield the offset of each occurrence that is not within an exception."""
        allowed = [found.span() for pattern in self.exceptions for found in pattern.finditer(text)]
        for found in pattern_of(self.words).finditer(text):
            if not any(a <= found.start() and found.end() <= b for a, b in allowed):
                yield found.start()


def pattern_of(words: str) -> re.Pattern[str]:
    """Match whole words, over line breaks too. The first letter may be upper case."""
    first, *rest = (re.escape(word) for word in words.split())
    start = f"[{first[0].upper()}{first[0]}]{first[1:]}"
    begin = r"(?<![Tt]here\s)(?<![\w'-])" if first in ("is", "are") else r"(?<![\w'-])"
    return re.compile(begin + r"\s+".join([start, *rest]) + r"(?![\w'-])")


def phrases() -> list[Phrase]:
    """Read the table from docs/style.md."""
    section = STYLE.read_text(encoding="utf-8").partition("\n## Words\n")[2].partition("\n## ")[0]
    found: list[Phrase] = []
    for row in re.findall(r"^\| (`.+) \|$", section, re.M):
        these, instead, but = (cell.strip() for cell in row.split("|"))
        exceptions = tuple(pattern_of(words) for words in re.findall(r"`([^`]+)`", but))
        found += [Phrase(words, instead, exceptions) for words in re.findall(r"`([^`]+)`", these)]
    return found


def blank(text: str) -> str:
    """Replace every character except white space."""
    return re.sub(r"\S", CODE, text)


def markdown_text(source: str) -> str:
    """Blank out code blocks, code in backticks and the targets of links."""
    return MARKDOWN_CODE.sub(lambda found: blank(found[0]), source)


def c_part(found: re.Match[str]) -> str:
    """Keep a comment or string, without its frame; blank out anything else."""
    if found.lastgroup is None:
        return blank(found[0])
    before = found.start(found.lastgroup) - found.start()
    kept = re.sub(r"(?<=\n)[ \t]*\*", lambda star: " " * len(star[0]), found[found.lastgroup])
    return (" " * before + kept).ljust(len(found[0]))


def c_text(source: str) -> str:
    """Blank out all but comments and strings. Keep offsets; drop the frames of comments."""
    return C_TEXT.sub(c_part, source)


def python_text(source: str) -> str:
    """Blank out all but comments and strings. Keep offsets; drop quotes, prefixes and #."""
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    wanted = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    parts: list[str] = []
    end = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in wanted:
            continue
        begin = starts[token.start[0] - 1] + token.start[1]
        parts.append(blank(source[end:begin]))
        end = starts[token.end[0] - 1] + token.end[1]
        text = source[begin:end]
        parts.append(FRAME.sub(lambda frame: " " * len(frame[0]), text))
    return "".join(parts) + blank(source[end:])


READERS = {
    ".md": markdown_text,
    ".py": python_text,
    **dict.fromkeys((".c", ".h", ".cu", ".cuh"), c_text),
    **dict.fromkeys((".sh", ".toml", ".yml", ".yaml", ".cff", ".in", ".txt", ".pyi"), str),
}
# Files without a suffix, or whose whole name is one.
NAMES = ("Makefile", ".ci/run", ".clang-tidy", ".clang-format")
# The corpora are inputs; style.md has the table itself.
LEFT_OUT = ("tests/fuzz/corpus/", "docs/style.md")


def reader_of(path: pathlib.Path) -> Callable[[str], str]:
    """Return the function that blanks out what is not text; most files have only text."""
    return READERS.get(path.suffix, str)


def files() -> list[pathlib.Path]:
    """Return every file that is searched by default."""
    return [
        ROOT / name
        for name in cbuild.project_files()
        if not name.startswith(LEFT_OUT)
        and (pathlib.PurePath(name).suffix in READERS or name in NAMES)
    ]


def main() -> int:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", action="store_true", help="print counts instead of places")
    parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    known = phrases()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for path in [file.resolve() for file in options.files] or files():
        text = reader_of(path)(path.read_text(encoding="utf-8"))
        name = path.relative_to(ROOT)
        flat = " ".join(text.split())  # a quick test; it saves most of the time
        likely = [phrase for phrase in known if phrase.words[1:] in flat]
        for at, n in sorted((at, n) for n, p in enumerate(likely) for at in p.places(text)):
            counts[likely[n].words][str(name.parent)] += 1
            if not options.count:
                line = text.count("\n", 0, at) + 1
                print(f"{name}:{line}: {likely[n].words!r} -> {likely[n].instead}")
    if options.count:
        for words, where in sorted(counts.items(), key=lambda item: -item[1].total()):
            print(f"{where.total():5} {words}: {dict(where.most_common())}")
    print(f"{sum(where.total() for where in counts.values())} found", file=sys.stderr)
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
