"""What SECURITY.md says is never unpickled is not."""

import ast

from launcher import ROOT

# What runs code that it finds in bytes or text.
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "joblib"}


def unpickling(tree):
    """Names by which a module could run what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.split(".")[0] in MODULES or "serialize" in node.module:
                yield node.module
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in ("eval", "exec"):
                yield function.id
            elif isinstance(function, ast.Attribute) and function.attr in ("load", "loads"):
                owner = ast.unparse(function.value)
                if owner in ("np", "numpy", "torch"):
                    yield f"{owner}.{function.attr}"


def test_three_modules_run_what_they_read_and_no_fourth():
    found = {}
    for package in ("collectives", "strategies"):
        for path in (ROOT / package).rglob("*.py"):
            if names := set(unpickling(ast.parse(path.read_text()))):
                found[str(path.relative_to(ROOT))] = names
    assert found == {
        "collectives/calls/pickling.py": {"pickle"},
        "collectives/kernels/numba_cache.py": {"numba.core.serialize"},
        "strategies/launcher.py": {"cloudpickle", "pickle"},
    }


def test_only_methods_of_objects_use_pickle():
    """Who calls `pickling.loads` has "object" in its name, or is a part of such a call."""
    callers = set()
    for path in (ROOT / "collectives").rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
                if any(ast.unparse(call) == "pickling.loads" for call in calls):
                    callers.add(function.name)
    assert callers == {
        "allgather_object", "from_root", "gather_object", "recv_object", "scatter_object",
    }  # fmt: skip
