"""Wording that reads as translated: hits per 1,000 lines of text, and ceilings that only fall.

python tests/prose.py [--list N] [PATH ...]   hits of each rule, and N passages of each
python tests/prose.py --lower                 write the ceilings that the texts reach now
python tests/prose.py --commits [BASE]        check the commits of a change: subjects of at most 72
                                              columns, and no ceiling raised
"""

from __future__ import annotations

import argparse
import ast
import bisect
import io
import json
import math
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = ROOT / "tests" / "prose.json"
PAGES = ("*.md", "docs/**/*.md", "slurm/*.md", "packaging/*.md", ".github/**/*.md")
PACKAGES = ("collectives/**/*.py", "strategies/**/*.py")
COLUMNS = 100  # of a page's line
SUBJECT = 72  # columns of a commit's subject

# Name -> expression, and a sentence that it finds.
RULES = {
    "free relative": (
        r"\b(says?|tells?|see|knows?|finds?|of|by|in|for|with|and|is|are|to) what\b"
        r"|(?:^|[.;:] )(?-i:What|Which|Whatever|Whoever) [^.?!]*(?:[.!;]|$)",
        "What is tested says the table.",
    ),
    "those that": (r"\bthose (that|who|which|whose)\b", "Ranks wait for those that live."),
    "of which": (
        r"(?:^|[,;.] )(of|in|by|from|for|after|to) (which|whom|whose)\b",
        "Two jobs, of which one ends.",
    ),
    "nobody, somebody": (r"\b(nobody|somebody|whoever|anybody)\b", "Nobody waits."),
    "is no, are none": (
        r"\b(is|are|was|were) (no|none)\b(?! longer| more)|\b(has|have) none\b",
        "This is no error.",
    ),
    ", too": (r", too(?=[.,;:)]|$)", "Plans do, too."),
    "tell, hear": (r"\b(told|tells?|hears?|heard)\b", "Rank 0 tells the others."),
    "come, go": (
        r"\b(comes?|came|goes) (by|from|to|first|next|of|in|out|on|with|late|there)\b"
        r"|\b(do|does|did) not come\b|\bgo(es)? on\b",
        "The job goes on.",
    ),
    "anew, as it is": (
        r"\b(anew|likewise|as given|so many)\b|(?<!twice )(?<!times )\bas many\b"
        r"|\bas (it is|they are)\b",
        "Plans are made anew.",
    ),
    "lie, stand, bring": (r"\b(lies?|stands?|brings?|begins? alike)\b", "The file lies there."),
    "the others": (
        r"\bthe others?\b (go|are|is|do|does|wait|will|may|have|has|hear|end)\b",
        "The others wait.",
    ),
}
_COMPILED = {name: re.compile(rule, re.IGNORECASE) for name, (rule, _) in RULES.items()}


class Line(NamedTuple):
    """A line of text, and whether it begins a passage; an empty one ends a passage."""

    number: int
    text: str
    begins: bool


class Hit(NamedTuple):
    """A rule's hit: its line, and the words around it."""

    rule: str
    line: int
    passage: str


def page_lines(source: str) -> Iterator[Line]:
    """Yield the text of a page, without blocks of code; code in lines and addresses are `x`."""
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text.startswith("```"):
            fenced = not fenced
        elif not fenced:
            begins = text.startswith(("#", "|", "<")) or re.match(r"[-*] |\d+\. ", text)
            yield Line(number, re.sub(r"\]\([^)]*\)", "]", _without_code(text)), bool(begins))


def source_lines(source: str) -> Iterator[Line]:
    """Yield what people read in a module: docstrings, texts of errors and comments."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node, clean=False)):
            for index, line in enumerate(text.splitlines()):
                if not line.lstrip().startswith((">>>", "...")):
                    # `Args:`, and each argument.
                    begins = index == 0 or re.match(r"\s*[\w*, `]+: |\s*\w+:$", line)
                    number = node.body[0].lineno + index
                    yield Line(number, _without_code(line.strip()), bool(begins))
        elif isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                text = part.value if isinstance(part, ast.Constant) else None
                if isinstance(text, str) and " " in text:
                    yield Line(part.lineno, text.strip(), True)
    before = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            number = token.start[0]
            yield Line(number, _without_code(token.string.lstrip("# ")), number != before + 1)
            before = number


def _without_code(text: str) -> str:
    return re.sub(r"`[^`]*`", "`x`", text)


def lines_of(path: Path) -> list[Line]:
    """Return the lines of text of a page or module."""
    source = path.read_text(encoding="utf-8")
    return list(page_lines(source) if path.suffix == ".md" else source_lines(source))


def hits(lines: Iterable[Line]) -> Iterator[Hit]:
    """Yield the hits of all rules, in passages joined over line ends."""
    passages: list[list[Line]] = [[]]
    for line in lines:
        if line.begins or not line.text:
            passages.append([])
        if line.text:
            passages[-1].append(line)
    for passage in filter(None, passages):
        text = " ".join(line.text for line in passage)
        starts = list(accumulate((len(line.text) + 1 for line in passage[:-1]), initial=0))
        for rule, expression in _COMPILED.items():
            for match in expression.finditer(text):
                line = passage[bisect.bisect_right(starts, match.start()) - 1]
                shown = text[max(0, match.start() - 40) : match.end() + 40]
                yield Hit(rule, line.number, shown)


def wide_lines(source: str) -> Iterator[int]:
    """Yield the numbers of a page's lines that are too wide and can be wrapped.

    Rows of tables and code may be wide, and a word or code in a line cannot be wrapped.
    """
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        text = re.sub(r"^\s*([-*] |\d+\. )?\s*", "", line)
        words = re.sub(r"`[^`]*`", lambda code: "x" * len(code[0]), text)
        wrappable = " " in words and not text.startswith(("|", "#"))
        if len(line) > COLUMNS and wrappable and not fenced:
            yield number


def files(patterns: Iterable[str]) -> list[Path]:
    """Return the files of patterns, without links and without the pages that a build writes."""
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [path for path in found if not path.is_symlink() and path.parent != ROOT / "docs/api"]


def measured() -> dict[str, int]:
    """Return hits per 1,000 lines of text, rounded up, and the number of wide lines of pages."""
    found = {}
    for name, patterns in (("pages", PAGES), ("packages", PACKAGES)):
        texts = [lines_of(path) for path in files(patterns)]
        number = sum(1 for lines in texts for _ in hits(lines))
        found[name] = math.ceil(1000 * number / sum(map(len, texts)))
    found["wide lines"] = sum(1 for page in files(PAGES) for _ in wide_lines(page.read_text()))
    return found


def ceilings() -> dict[str, int]:
    """Return the ceilings that are written down."""
    found: dict[str, int] = json.loads(CEILINGS.read_text())
    return found


def lower() -> None:
    """Write the ceilings that are reached now, where they are lower."""
    now, before = measured(), ceilings()
    lowest = {name: min(now[name], before[name]) for name in now}
    CEILINGS.write_text(json.dumps(lowest, indent=4) + "\n")


def long_subjects(subjects: Iterable[str]) -> list[str]:
    """Return the subjects of commits that are too long."""
    return [subject for subject in subjects if len(subject) > SUBJECT]


def raised(before: dict[str, int], now: dict[str, int]) -> list[str]:
    """Return the names of ceilings that are higher than before, or gone."""
    return [name for name in before if name not in now or now[name] > before[name]]


def _git(*arguments: str) -> str:
    command = ["git", "-c", f"safe.directory={ROOT}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def start_of_change(named: str | None) -> str:
    """Return the commit that a change starts from.

    It is the ancestor of a named commit, by default of the remote's branch. On that branch itself
    the change is the last commit.
    """
    if named is None and _git("for-each-ref", "refs/remotes/origin/HEAD"):
        named = "origin/HEAD"
    base = _git("merge-base", "HEAD", named).strip() if named else ""
    last = _git("rev-list", "--first-parent", "--max-count=2", "HEAD").split()
    return last[-1] if base in ("", last[0]) else base


def check_commits(named: str | None) -> int:
    """Print the long subjects and raised ceilings of a change; returns the exit status."""
    base, file = start_of_change(named), str(CEILINGS.relative_to(ROOT))
    subjects = _git("log", "--no-merges", "--format=%s", f"{base}..HEAD").splitlines()
    wrong = [f"subject over {SUBJECT} columns: {text}" for text in long_subjects(subjects)]
    if _git("ls-tree", base, file):
        before = json.loads(_git("show", f"{base}:{file}"))
        wrong += [f"{file}: {name} was raised" for name in raised(before, ceilings())]
    for text in wrong:
        print(text)
    return 1 if wrong else 0


def show(paths: list[Path], most: int) -> None:
    """Print the hits of each rule in files, or in all pages and packages."""
    paths = [p for path in paths for p in ([path] if path.is_file() else sorted(path.rglob("*")))]
    paths = [path for path in paths if path.suffix in (".md", ".py")]
    number, found = 0, []
    for path in paths or files([*PAGES, *PACKAGES]):
        lines = lines_of(path)
        number += len(lines)
        found += [(path, hit) for hit in hits(lines)]
    for rule in sorted(RULES, key=lambda rule: -sum(hit.rule == rule for _, hit in found)):
        of_rule = [(path, hit) for path, hit in found if hit.rule == rule]
        print(f"{len(of_rule):6d}  {rule}")
        for path, hit in of_rule[:most]:
            print(f"        {path}:{hit.line}: {hit.passage}")
    print(f"{len(found):6d}  hits in {number} lines of text")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--list", type=int, default=0)
    parser.add_argument("--lower", action="store_true")
    parser.add_argument("--commits", nargs="?", const="", metavar="BASE")
    options = parser.parse_args()
    if options.commits is not None:
        return check_commits(options.commits or None)
    if options.lower:
        lower()
    else:
        show(options.paths, options.list)
    return 0


if __name__ == "__main__":
    sys.exit(main())
