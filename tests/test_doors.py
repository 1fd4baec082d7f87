"""Tests come in by the public doors: none reaches into a private attribute."""

import ast

from launcher import ROOT

# Public in spite of their underscore: of named tuples, of the standard library, and of PyTorch.
PUBLIC = {
    "_replace", "_asdict", "_fields", "_make", "_exit", "_getframe", "_current_frames",
    "_attention", "_c10d_functional", "_flatten", "_register_fused_optim",
}  # fmt: skip


def reaches(tree):
    """Yield each `thing._name` in a file, but for what a class does to itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and not node.attr.startswith("__") and node.attr not in PUBLIC:
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_test_reaches_into_private_attributes():
    found = [
        f"{file.relative_to(ROOT)}:{reach}"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for reach in reaches(ast.parse(file.read_text()))
    ]
    assert not found, "\n".join(["a test that needs one of these needs a public door:", *found])


def test_what_counts():
    text = "a._b\na._b._c\nself._d\nself._d._e\ncls._f\na.b\na.__class__\nt._replace()\n_g"
    assert list(reaches(ast.parse(text))) == [
        "1: a._b", "2: a._b._c", "4: self._d._e", "2: a._b",
    ]  # fmt: skip
