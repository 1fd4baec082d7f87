"""The examples of docs/input.md are true, on the two ranks of which the page speaks."""

import re
import textwrap

from launcher import ROOT, mpirun
from requirements import needs

PAGE = ROOT / "docs" / "input.md"


def test_examples(tmp_path):
    # The first section is one program of both ranks; what follows needs a folder for each.
    program = f"""
        import doctest, os, pathlib
        import collectives as cc
        text = pathlib.Path({str(PAGE)!r}).read_text()
        several, alone = text.split("## Text files")
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        names = {{}}
        for part, least in (several, 15), (alone, 25):
            test = doctest.DocTestParser().get_doctest(part, names, "input.md", None, 0)
            runner = doctest.DocTestRunner(optionflags=options)
            runner.run(test, clear_globs=False)
            assert runner.failures == 0 and runner.tries > least, (runner.failures, runner.tries)
            names = test.globs
            os.mkdir(str(cc.rank()))
            os.chdir(str(cc.rank()))
        print("done")
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    result = mpirun(2, "program.py", cwd=tmp_path, timeout=110, PYTHONPATH=str(ROOT))
    assert result.stdout.split() == ["done", "done"], result.stdout + result.stderr


def test_a_loader_of_pytorch(tmp_path):
    needs("torch")
    begin = PAGE.read_text().index("### A `DataLoader` of PyTorch")
    blocks = re.findall(r"^```(?:python)?\n(.*?)^```$", PAGE.read_text()[begin:], re.M | re.S)
    (tmp_path / "program.py").write_text(blocks[0])
    result = mpirun(2, "program.py", cwd=tmp_path, timeout=110, PYTHONPATH=str(ROOT)).checked()
    assert result.stdout == blocks[1]
