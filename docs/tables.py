"""Generated tables of pages and docstrings: components, modules, algorithms and their costs.

python docs/tables.py    writes the tables of docs/architecture.md and docs/operations.md, and the
                         names of algorithms in the docstrings of operations
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = ROOT / "collectives" / "algorithms"
BEGIN = "<!-- by docs/tables.py: -->\n"
END = "<!-- end -->\n"


def floors(package: str) -> list[set[str]]:
    """Return the components of each layer, which tests/test_floors.py lists."""
    for node in ast.parse((ROOT / "tests" / "test_floors.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            found: dict[str, list[set[str]]] = ast.literal_eval(node.value)
            return found[package]
    raise LookupError("tests/test_floors.py has no FLOORS")


def purpose(file: Path) -> str:
    """Return the first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    sentence = re.split(r"(?<=[.?!])\s", " ".join(docstring.partition("\n\n")[0].split()))[0]
    return sentence.removesuffix(".").replace("|", r"\|")


def tables(package: str) -> Iterator[str]:
    """Give the lines of a package's section."""
    yield from (
        f"## {package}\n",
        "\n",
        "| layer | component | purpose |\n",
        "| --- | --- | --- |\n",
    )
    folders = []
    for number, components in enumerate(floors(package)):
        for component in sorted(components - {"__init__", "__main__"}):
            folder = ROOT / package / component
            if folder.is_dir():
                folders.append(folder)
                yield f"| {number} | `{component}/` | {purpose(folder / '__init__.py')} |\n"
            else:
                yield f"| {number} | `{component}.py` | {purpose(folder.with_suffix('.py'))} |\n"
    for folder in folders:
        yield from ("\n", f"### {package}/{folder.name}\n", "\n")
        yield from ("| module | purpose |\n", "| --- | --- |\n")
        for file in sorted(folder.rglob("*.py")):
            if file.name != "__init__.py":
                yield f"| `{file.relative_to(ROOT / package)}` | {purpose(file)} |\n"
    yield "\n"


def implementations() -> dict[str, dict[str, str]]:
    """Return operation -> name of an algorithm -> its module, in the order of the code."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse((ALGORITHMS / "selection.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            rows = node.value
            if ast.unparse(node.target) == "SCANS":  # one table of names for two operations
                rows = ast.Dict([ast.Constant("scan, exscan")], [rows])
            for operation, names in zip(rows.keys, rows.values, strict=True):
                assert isinstance(names, ast.Dict)
                found[ast.literal_eval(operation)] = {
                    ast.literal_eval(name): re.findall(r"\w+(?=\.)", ast.unparse(value))[0]
                    for name, value in zip(names.keys, names.values, strict=True)
                }
    return found


def algorithms() -> dict[str, list[str]]:
    """Return the names of the algorithms of each operation, in the order of the code."""
    return {
        operation: ["auto", "node", *names]
        for operation, names in implementations().items()
        if operation != "scan, exscan"
    }


def costs(module: str) -> dict[str, str]:
    """Return operation -> messages, bytes and scratch, from the table in a module's docstring."""
    text = ast.get_docstring(ast.parse((ALGORITHMS / f"{module}.py").read_text())) or ""
    _, _, table = text.partition("  scratch\n")
    rows = [re.split(" {2,}", row.strip()) for row in table.partition("\n\n")[0].splitlines()]
    return {operation: " | ".join(cells) for operation, *cells in rows}


def cost_table() -> Iterator[str]:
    """Yield the lines of the table of costs; the costs of MPI's own algorithms are unknown."""
    yield "| operation | algorithm | messages sent per rank | bytes sent per rank | scratch |\n"
    yield "| --- | --- | --- | --- | --- |\n"
    for operation, names in implementations().items():
        for name, module in names.items():
            if name != "native":
                yield f"| {operation} | {name} | {costs(module)[operation]} |\n"


def algorithm_table() -> Iterator[str]:
    """Give the lines of the table of docs/operations.md."""
    found = algorithms()
    names = list(dict.fromkeys(name for row in found.values() for name in row))
    names.append(names.pop(names.index("native")))
    yield "| operation | " + " | ".join(f"`{name}`" for name in names) + " |\n"
    yield "| --- |" + " --- |" * len(names) + "\n"
    for operation, row in found.items():
        marks = " | ".join("x" if name in row else "" for name in names)
        yield re.sub(" +", " ", f"| `{operation}` | {marks} |\n")


def docstring(text: str, names: dict[str, list[str]]) -> str:
    """Return the text of a module whose operations list the algorithms of today."""
    for operation, row in names.items():
        quoted = [f'"{name}"' for name in row]
        listed = f"{', '.join(quoted[:-1])} or {quoted[-1]}"
        for title, indent in (("algorithm: ", 8), ("Algorithms: ", 4)):
            head = rf"(\ndef {operation}\((?:(?!\ndef ).)*?\n {{{indent}}})"
            more = " " * (12 if indent == 8 else 4)
            wrapped = textwrap.fill(title + listed, 99 - indent, subsequent_indent=more)
            pattern = rf'{head}{title}"auto"[^;.]*([;.])'
            text = re.sub(pattern, lambda m, new=wrapped: m[1] + new + m[2], text, flags=re.DOTALL)
    return text


def between(page: Path, *tables: Iterable[str]) -> str:
    """Return a page with these tables between its marks, in their order."""
    first, *parts = page.read_text().split(BEGIN)
    for table, part in zip(tables, parts, strict=True):
        first += BEGIN + "\n" + "".join(table) + END + part.partition(END)[2]
    return first


def texts() -> dict[Path, str]:
    """Return the texts of all files with something generated, as they should be."""
    packages = [line for package in ("collectives", "strategies") for line in tables(package)]
    names = algorithms()
    architecture, operations = ROOT / "docs" / "architecture.md", ROOT / "docs" / "operations.md"
    found = {
        architecture: between(architecture, packages, [*cost_table(), "\n"]),
        operations: between(operations, [*algorithm_table(), "\n"]),
    }
    for file in sorted((ROOT / "collectives" / "operations").glob("*.py")):
        found[file] = docstring(file.read_text(), names)
    return found


if __name__ == "__main__":
    for path, wanted in texts().items():
        if path.read_text() != wanted:
            path.write_text(wanted)
