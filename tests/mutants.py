"""Draw mutants of the packages at random, and run the tests that belong to each.

    python tests/mutants.py [--seed 1] [--number 400] [--again OLD] OUT.jsonl [FOLDERS]
    python tests/mutants.py --compare OLD NEW

The tests of a mutant are those of its room in `tests/unit`, and the conformance tests that import
the room, use a public name of the file or, for `collectives`, call a communicator, in one process
and as two ranks. They run in a temporary copy of this checkout until one fails, on a machine with
nothing else to do. `--again` repeats the mutants of OLD. `--compare` lists the mutants that OLD
killed and NEW does not, and fails if there are any.
"""

import argparse
import ast
import copy
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from run import CONFORMANCE, NOTHING_CHOSEN, descendants

from launcher import ROOT, environment, mpirun_path

FOLDERS = [f"collectives/{room}" for room in ("algorithms", "operations", "plans", "node")]
FOLDERS += [f"strategies/{room}" for room in ("averaging", "checkpoint", "variables", "rpc")]

# Conformance tests of `collectives`, which call its rooms through the communicator only.
COMMUNICATOR = ("operations", "composites", "planned", "repeats", "errors", "asynchronous")

_PAIRS = (
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.And, ast.Or),
)  # fmt: skip
_SWAPS = dict(_PAIRS) | {other: one for one, other in _PAIRS}

# Statements that only log, warn or name; fields that are types, decorators or messages of errors.
_SILENT = re.compile(r"(log|logger|logging|warnings)\.\w+\(|__all__|if TYPE_CHECKING")
_LEFT_OUT = ("annotation", "returns", "msg", "exc", "cause", "decorator_list")


def main(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=400)
    parser.add_argument("--again", type=read, metavar="OLD")
    parser.add_argument("--compare", type=read, metavar="OLD")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    options = parser.parse_args(arguments)
    if options.compare:
        return compare(options.compare, read(options.out))
    files = sorted(file for folder in options.folders for file in (ROOT / folder).rglob("*.py"))
    mutants = [mutant for file in files for mutant in mutants_of(file)]
    chosen = [mutant for mutant in mutants if mutant["id"] in (options.again or ())]
    if not options.again:
        chosen = random.Random(options.seed).sample(mutants, min(options.number, len(mutants)))
    print(f"{len(chosen)} of {len(mutants)} mutants", flush=True)
    with tempfile.TemporaryDirectory() as folder, options.out.open("w") as out:
        ignored = shutil.ignore_patterns(".git", ".venv*", "out")
        shutil.copytree(ROOT, folder, symlinks=True, ignore=ignored, dirs_exist_ok=True)
        limits = {}
        for mutant in sorted(chosen, key=lambda mutant: (mutant["file"], mutant["start"])):
            mutant["killed"] = run_tests(Path(folder), mutant, limits)
            print(json.dumps(mutant), file=out, flush=True)
            print(mutant["file"], mutant["line"], mutant["killed"] or "SURVIVED", flush=True)
    return 0


def mutants_of(path):
    """Yield the mutants of a file: `after` replaces `before`, which begins at byte `start`."""
    file, source = str(path.relative_to(ROOT)), path.read_bytes()
    lines = source.splitlines(keepends=True)
    same = Counter()
    for node, after in changes(ast.parse(source)):
        start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
        end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
        before = source[start:end].decode()
        # The identity outlives changes of other lines.
        change = f"{file}: {lines[node.lineno - 1].decode().strip()}: {before} -> {after}"
        same[change] += 1
        name = hashlib.sha256(f"{change} {same[change]}".encode()).hexdigest()[:12]
        values = name, file, node.lineno, start, before, after
        yield dict(zip(("id", "file", "line", "start", "before", "after"), values, strict=True))


def changes(node):
    """Yield nodes below `node`, each with the code that replaces it."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            silent = isinstance(child, ast.stmt) and _SILENT.match(ast.unparse(child))
            if silent or field in _LEFT_OUT or not isinstance(child, ast.AST):
                continue
            if field == "test" and not isinstance(child, ast.Compare | ast.UnaryOp):
                yield child, f"(not ({ast.unparse(child)}))"
            for other in replacements(child):
                text = ast.unparse(other)
                yield child, text if isinstance(other, ast.stmt) else f"({text})"
            if not isinstance(child, ast.JoinedStr | ast.pattern):
                yield from changes(child)


def replacements(node):
    """Yield what a mutant may have in place of a node."""

    def changed(**fields):
        other = copy.copy(node)
        vars(other).update(fields)
        return other

    match node:
        case ast.Compare(ops=[op, *ops]):
            yield changed(ops=[_SWAPS[type(op)](), *ops])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in _SWAPS:
            yield changed(op=_SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool(value)):
            yield changed(value=not value)
        case ast.Constant(value=int(value)):
            yield changed(value=value + 1)
            yield changed(value=value - 1)
        case ast.Call(args=[one, other, *rest]) if ast.dump(one) != ast.dump(other):
            yield changed(args=[other, one, *rest])
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield changed(value=ast.Constant(None))
        case ast.Raise() | ast.Delete() | ast.Expr(value=ast.Call()):
            yield ast.Pass()


def run_tests(folder, mutant, limits):
    """Return the test that kills a mutant; None if it survives. `limits` has seconds by tests."""
    package, room, *_ = Path(mutant["file"]).parts
    names = re.findall(r"^(?:def|class) ([^\W_]\w+)", (ROOT / mutant["file"]).read_text(), re.M)
    uses = rf"^from {package}(\.| import ){room}\b|\b(strategies|cc)\.({'|'.join(names) or '-'})\b"
    tests = [f"tests/unit/{room}"]
    for file in sorted((ROOT / CONFORMANCE).glob("test_*.py")):
        through = package == "collectives" and file.stem[5:] in COMMUNICATOR
        if through or re.search(uses, file.read_text(), re.M):
            tests.append(f"{CONFORMANCE}/{file.name}")
    # A mutant may never stop allocating.
    commands = [["prlimit", "--data=16000000000", sys.executable, "-m", "pytest", *tests]]
    if tests[1:]:
        ranks = [mpirun_path(), "-np", "2", sys.executable, "tests/run.py", "--rank", "mutant"]
        commands += [[*ranks, *tests[1:]]]
    if str(tests) not in limits:
        began = time.monotonic()
        if failed := first_failure(folder, commands, None):
            sys.exit(f"{room}: expected tests that pass without a mutant, got {failed}")
        limits[str(tests)] = 5 * (time.monotonic() - began)  # the machine may be busier later
    path, start, before = folder / mutant["file"], mutant["start"], mutant["before"].encode()
    source = path.read_bytes()
    path.write_bytes(source[:start] + mutant["after"].encode() + source[start + len(before) :])
    killed = first_failure(folder, commands, limits[str(tests)])
    path.write_bytes(source)
    return killed


def first_failure(folder, commands, seconds):
    """Return the first test that fails, "timeout" after `seconds`, None if all pass."""
    for command, kind in zip(commands, ("", "mpi"), strict=False):
        process = subprocess.Popen(
            [*command, "-x", "-q", "--tb=no", "-p", "no:cacheprovider"], text=True, cwd=folder,
            env=environment(PYTHONPATH=str(folder), UNISONO_TEST_WORLD=kind),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            pids = [str(pid) for pid, _ in descendants(process.pid)]
            subprocess.run(["kill", "-KILL", str(process.pid), *pids], check=False)
            process.communicate()
            return "timeout"
        if process.returncode not in (0, NOTHING_CHOSEN):
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            return f"{kind} {failed[1] if failed else output[-200:]}".strip()
    return None


def read(path):
    return {row["id"]: row for row in map(json.loads, Path(path).read_text().splitlines())}


def compare(old, new):
    killed = [row for row in old.values() if row["killed"]]
    lost = [row for row in killed if not new.get(row["id"], {}).get("killed")]
    for row in lost:
        print(row, "survived" if row["id"] in new else "absent")
    print(f"{len(killed)} of {len(old)} mutants were killed, {len(lost)} of them no longer are")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
