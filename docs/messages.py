"""The page of all messages: every error that the sources make, by module, as readers see it.

What is filled in when it happens is shown as `...`. A text is followed to where it is written: into
variables, the arguments of helpers, and what helpers return; where it may be one of several, each
is listed.
"""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from collectives.tools import explain_error as remedies

PACKAGES = ("collectives", "strategies")
# Beside the classes of the page; others are raised and caught inside, or are faults of ours.
PYTHONS = {"ValueError", "TypeError", "RuntimeError", "OSError", "ImportError", "TimeoutError"}
OTHERS = {"DistBackendError": "PyTorch's", "HorovodInternalError": "Horovod's name"}

MOST = 12  # texts of one place: beyond, what differs is `...`
DEEPEST = 7  # helpers of helpers
FEWEST_LETTERS = 4  # of a text that says something
# Before and after that: the operation, and what is counted or named in parentheses.
_CORE = re.compile(r"^(?:[\w. ]+|\.\.\. \([^)]*\)): |(?:\s*\([^()]*\))+$")
# `strategies.rpc.client` adds the operation and the object to the error of another task.
_REMOTE = re.compile(r"[\w. ]+: (.+) \(object: [^()]*\)")


class Raised(NamedTuple):
    """One text of one place that makes an error."""

    file: str
    line: int
    kind: str  # the class
    text: str

    @property
    def slug(self) -> str:
        """The place's name on the page."""
        words = re.findall(r"[a-z0-9]+", f"{Path(self.file).stem} {self.text}".lower())
        return "-".join(words)[:90]


@functools.cache
def raised(root: Path) -> list[Raised]:
    """Return every error with a text of its own that the sources make."""
    paths = [path for name in PACKAGES for path in sorted((root / name).rglob("*.py"))]
    elsewhere: dict[str, list[_Source]] = {}
    sources = [_Source(ast.parse(path.read_text()), elsewhere) for path in paths]
    found: dict[Raised, None] = {}
    for path, source in zip(paths, sources, strict=True):
        for call, kind in sorted(source.made(), key=lambda one: (one[0].lineno, one[1])):
            for text in _tidy(source.texts(call.args[0], call)):
                found[Raised(str(path.relative_to(root)), call.lineno, kind, text)] = None
    return list(found)


def _tidy(texts: list[str]) -> list[str]:
    """Leave out texts that say nothing, or that another one means as well.

    Those that differ in the operation before the colon alone are one.
    """
    tidy = [re.sub(r"(?:\.\.\.\s*){2,}", "... ", " ".join(t.split())).strip() for t in texts]
    tidy = [t for t in tidy if sum(map(str.isalpha, _CORE.sub("", t))) >= FEWEST_LETTERS]
    rests = Counter(text.partition(": ")[2] for text in tidy)
    many = (
        re.sub(r"^[\w. ]+: ", "...: ", t) if rests[t.partition(": ")[2]] > 1 else t for t in tidy
    )
    return _few(many)


def listed(root: Path, text: str) -> bool:
    """Tell whether the text of an error is on the page.

    A client of another task puts its operation before what the task reports, and the object after.
    """
    whole = " ".join(text.split())
    reported = _REMOTE.fullmatch(whole)
    texts = [whole, reported[1]] if reported else [whole]
    return any(pattern.fullmatch(text) for pattern in _patterns(root) for text in texts)


@functools.cache
def _patterns(root: Path) -> list[re.Pattern[str]]:
    return [remedies.pattern(text) for text in dict.fromkeys(one.text for one in raised(root))]


def page(root: Path) -> str:
    """Return the page, which Sphinx reads as Markdown."""
    known = [entry for entry in remedies.entries() if entry.is_message]
    lines = ["# All messages", ""]
    lines += [
        "Every text that an error of ours may have, by the file that makes it. `...` is filled"
    ]
    lines += [
        "in when it happens. A class leads to what it means and what can be done about it; the"
    ]
    lines += ["texts that people meet most have a place of their own there. At a prompt:"]
    lines += ["`python -m collectives errors WORDS OF THE MESSAGE`.", ""]
    before = ""
    slugs: set[str] = set()
    for one in raised(root):
        if one.file != before:
            lines += ["", f"## {one.file}", ""]
            before = one.file
        shown = one.text.replace("`", "'")
        named = "" if one.slug in slugs else f"{{#{one.slug}}}"
        slugs.add(one.slug)
        remedy = next((entry for entry in known if entry.fits(one.text)), None)
        help_ = f", [what to do](../errors.md#{remedy.anchor})" if remedy else ""
        lines += [f"- {_linked(one.kind)}, line {one.line}{help_}: ``{shown}``{named}"]
    return "\n".join(lines) + "\n"


def _linked(kind: str) -> str:
    if kind in OTHERS:
        return f"{kind} ({OTHERS[kind]})"
    anchor = "wrong-use" if kind in PYTHONS else kind.lower()
    return f"[{kind}](../errors.md#{anchor})"


def _ours() -> set[str]:
    return {entry.title for entry in remedies.entries() if not entry.is_message}


class _Part(ast.expr):
    """One of several values that a call returns."""

    def __init__(self, call: ast.Call, index: int) -> None:
        super().__init__()
        self.call, self.index = call, index


class _Source:
    """One file: where it makes errors, and what their texts may be."""

    def __init__(self, tree: ast.Module, elsewhere: dict[str, list[_Source]]) -> None:
        self.tree = tree
        self.elsewhere = elsewhere  # name of a function -> the files that define one
        self.parents: dict[ast.AST, ast.AST] = {}
        self.functions: dict[str, list[ast.FunctionDef]] = {}
        self.calls: dict[str, list[ast.Call]] = {}
        returning: set[str] = set()  # names of functions that return something
        nodes: list[ast.AST] = [tree]
        for node in nodes:  # grows meanwhile: one walk for all, since most time goes there
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                nodes.append(child)
            if isinstance(node, ast.FunctionDef):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Call):
                self.calls.setdefault(_last_name(node.func), []).append(node)
            elif isinstance(node, ast.Return) and node.value:
                scope = self._function(node)
                while scope is not None:
                    returning.add(scope.name)
                    scope = self._function(scope)
        for name in returning:
            elsewhere.setdefault(name, []).append(self)
        self.all_files = elsewhere.setdefault("", [])
        self.all_files.append(self)

    def made(self) -> Iterator[tuple[ast.Call, str]]:
        """Yield the calls that make an error which users may see, with its class."""
        for name in (_ours() | PYTHONS | {*OTHERS}) & {*self.calls}:
            for call in self.calls[name]:
                if call.args and not isinstance(call.args[0], ast.Starred):
                    yield call, name

    def texts(self, node: ast.expr, place: ast.AST, depth: int = 0) -> list[str]:
        """Return what an expression may be as a text, `...` for what is not known."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        if isinstance(node, ast.JoinedStr):
            return _joined([self.texts(part, place, depth) for part in node.values])
        if isinstance(node, ast.FormattedValue):
            return self.texts(node.value, place, depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = (node.left, node.right)
            return _joined([self.texts(side, place, depth) for side in sides])
        if isinstance(node, ast.IfExp):
            return _few(
                [*self.texts(node.body, place, depth), *self.texts(node.orelse, place, depth)]
            )
        if isinstance(node, ast.BoolOp):
            return _few(t for value in node.values for t in self.texts(value, place, depth))
        if isinstance(node, ast.Name) and depth < DEEPEST:
            return self._named(node.id, place, depth + 1)
        if isinstance(node, ast.Attribute) and node.attr.isupper():
            return self._named(node.attr, self.tree, depth + 1)
        if isinstance(node, ast.Call) and depth < DEEPEST:
            return self._returned(node, depth + 1)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            return self._of_a_table(node.value.id, place, depth + 1)
        if isinstance(node, _Part) and depth < DEEPEST:
            return self._returned(node.call, depth + 1, node.index)
        return ["..."]

    def _function(self, place: ast.AST) -> ast.FunctionDef | None:
        while place in self.parents:
            place = self.parents[place]
            if isinstance(place, ast.FunctionDef):
                return place
        return None

    def _named(self, name: str, place: ast.AST, depth: int) -> list[str]:
        """Follow a variable: what is assigned to it, or is given to the function for it."""
        scope = self._function(place)
        while scope is not None:
            given = [argument.arg for argument in (*scope.args.posonlyargs, *scope.args.args)]
            if name in given or name in [argument.arg for argument in scope.args.kwonlyargs]:
                return self._given(scope, given, name, depth)
            if values := _assigned(scope).get(name):
                return _few(t for value in values for t in self.texts(value, place, depth))
            scope = self._function(scope)
        at_top = _assigned(self.tree, top=True).get(name, [])
        if not at_top and name.isupper():  # a constant of another file
            tops = (_assigned(one.tree, top=True) for one in self.all_files)
            there = [value for top in tops for value in top.get(name, [])]
            at_top = there if len(there) == 1 else []
        return _few(t for value in at_top for t in self.texts(value, place, depth)) or ["..."]

    def _given(
        self, function: ast.FunctionDef, names: list[str], name: str, depth: int
    ) -> list[str]:
        """Return what the calls of a function in this file give for an argument."""
        found: list[str] = []
        own = names[:1] in (["self"], ["cls"])
        for call in self.calls.get(function.name, []):
            values = {keyword.arg: keyword.value for keyword in call.keywords}
            at = names.index(name) - own if name in names else len(call.args)
            if at < len(call.args):
                values[name] = call.args[at]
            if name in values and not isinstance(values[name], ast.Starred):
                found += self.texts(values[name], call, depth)
            else:
                found.append("...")
        return _few(found) or ["..."]

    def _returned(self, call: ast.Call, depth: int, index: int | None = None) -> list[str]:
        """Return what a function may return, or one of several values of it.

        It is one of this file, or the only one of that name.
        """
        name = _last_name(call.func)
        if isinstance(call.func, ast.Attribute) and name == "format":
            formats = self.texts(call.func.value, call, depth)
            return [re.sub(r"\{[^}]*\}", "...", text) for text in formats]
        if isinstance(call.func, ast.Attribute) and name == "get":
            return self._of_a_table(_last_name(call.func.value), call, depth)
        found: list[str] = []
        there = self.elsewhere.get(name, [])
        if self not in there and len(there) == 1:
            return there[0]._returned(call, depth, index)
        if not there and isinstance(call.func, ast.Name):
            return self._by_the_caller_s(name, call, depth)
        for function in self.functions.get(name, []):
            for node in ast.walk(function):
                value = node.value if isinstance(node, ast.Return) else None
                if index is not None:
                    value = value.elts[index] if isinstance(value, ast.Tuple) else None
                if value is not None:
                    found += self.texts(value, node, depth)
        return _few(found) or ["..."]

    def _by_the_caller_s(self, name: str, call: ast.Call, depth: int) -> list[str]:
        """Return what functions return that are given for an argument, such as `explain`."""
        scope = self._function(call)
        names = [argument.arg for argument in scope.args.args] if scope else []
        if scope is None or name not in names:
            return ["..."]
        found: list[str] = []
        for source in self.all_files:
            for outer in source.calls.get(scope.name, []):
                values = {keyword.arg: keyword.value for keyword in outer.keywords}
                given = values.get(name, [*outer.args, *[None] * 9][names.index(name)])
                variable = _last_name(given) if given else ""
                for one in [given, *_assigned(source.tree).get(variable, [])]:
                    made_by_partial = (
                        isinstance(one, ast.Call) and _last_name(one.func) == "partial"
                    )
                    function = one.args[0] if made_by_partial else one
                    if isinstance(function, ast.Name) and function.id in source.functions:
                        inner = ast.Call(function, [], [])
                        found += source._returned(inner, depth)
        return _few(found) or ["..."]

    def _of_a_table(self, name: str, place: ast.AST, depth: int) -> list[str]:
        tables = _assigned(self.tree, top=True).get(name, [])
        values = [v for t in tables if isinstance(t, ast.Dict) for v in t.values]
        return _few(t for value in values for t in self.texts(value, place, depth)) or ["..."]


@functools.cache
def _assigned(scope: ast.AST, top: bool = False) -> dict[str, list[ast.expr]]:
    """Return what is assigned to each variable; of `a, b = f()` the part of it as `f()[0]`."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.iter_child_nodes(scope) if top else ast.walk(scope):
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = [node.target]
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(node.value)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Call):
                for index, name in enumerate(map(_last_name, target.elts)):
                    found.setdefault(name, []).append(_Part(node.value, index))
    return found


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _joined(parts: list[list[str]]) -> list[str]:
    """Join the pieces of a text; where there are too many ways, those that vary most are `...`."""
    while math.prod(map(len, parts)) > MOST:
        most = max(range(len(parts)), key=lambda number: len(parts[number]))
        parts[most] = ["..."]
    return _few("".join(way) for way in itertools.product(*parts))


def _few(texts: Iterable[str]) -> list[str]:
    """Return different texts, dots run together, at most so many; none that another means, too."""
    every = list(dict.fromkeys(re.sub(r"(?:\.\.\.\s*){2,}", "... ", text) for text in texts))
    if len(every) > 1:
        wider = [(t, remedies.pattern(t)) for t in every if any(map(str.isalpha, t))]
        every = [t for t in every if not any(w != t and p.fullmatch(t) for w, p in wider)]
    return every if len(every) <= MOST else [*every[: MOST - 1], "..."]
