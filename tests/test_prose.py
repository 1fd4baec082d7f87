"""The wording of pages, docstrings, comments and errors keeps to its ceilings."""

import json
import subprocess

import pytest

import prose

LONG = "word " * 20 + "end."  # more than 100 columns


def rules(source, lines=prose.page_lines):
    return [hit.rule for hit in prose.hits(lines(source))]


@pytest.fixture(scope="module")
def now():
    return prose.measured()


@pytest.mark.parametrize("name", prose.ceilings())
def test_texts_keep_to_their_ceilings(name, now):
    ceiling = prose.ceilings()[name]
    assert now[name] <= ceiling, "to see the passages: python tests/prose.py --list 9"
    assert now[name] == ceiling, "it fell; write that down: python tests/prose.py --lower"


@pytest.mark.parametrize("name", prose.RULES)
def test_a_rule_finds_its_sentence_and_only_this_rule_does(name):
    assert rules(prose.RULES[name][1]) == [name]


@pytest.mark.parametrize(
    "sentence",
    [
        "`init` returns the communicator of all ranks.",
        "What does it cost?",
        "A plan is no longer valid; twice as many ranks.",
        "The other ranks raise `MismatchError`.",
        "`those that` is code, and [a link](what-is-it.md#nobody) has an address.",
    ],
)
def test_plain_sentences_have_no_hit(sentence):
    assert rules(sentence) == []


def test_passages_are_joined_over_line_ends_and_hits_name_the_line():
    page = "The ranks wait for\nthose\nthat live.\n\nThey resume, too.\n"
    found = list(prose.hits(prose.page_lines(page)))
    assert [(hit.rule, hit.line) for hit in found] == [("those that", 2), (", too", 5)]


@pytest.mark.parametrize("between", ["\n\n", "\n- ", "\n# ", "\n| "])
def test_passages_end_with_a_paragraph_an_entry_a_heading_and_a_row(between):
    assert rules(f"A list of those{between}that live") == []


def test_blocks_of_code_have_no_text():
    assert rules("```python\n# nobody\n```\nnobody\n") == ["nobody, somebody"]


def test_docstrings_errors_and_comments_of_modules_are_read_and_code_is_not():
    source = (
        '"""Nobody knows."""\n'
        "# It goes\n"
        "# on.\n"
        "nobody = 1\n"
        "def f(x):\n"
        '    """Return x.\n\n    >>> nobody\n    """\n'
        '    raise ValueError(f"{x} is none of ours")\n'
    )
    assert sorted(rules(source, prose.source_lines)) == [
        "come, go", "is no, are none", "nobody, somebody",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (LONG, [1]),
        (f"- {LONG}", [1]),
        (f"| {LONG} |", []),
        (f"```\n{LONG}\n```\n{LONG}", [4]),
        (f"- `{LONG}`", []),
        ("x" * 101, []),
        ("x " * 50, []),
    ],
)
def test_wide_lines(page, expected):
    assert list(prose.wide_lines(page)) == expected


def test_a_ceiling_may_fall_but_neither_rise_nor_go():
    assert prose.raised({"a": 2, "b": 2, "c": 2}, {"a": 1, "b": 3}) == ["b", "c"]


def test_lower_does_not_raise_a_ceiling(tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "CEILINGS", tmp_path / "prose.json")
    monkeypatch.setattr(prose, "measured", lambda: {"pages": 7, "packages": 9})
    prose.CEILINGS.write_text('{"pages": 8, "packages": 8}')
    prose.lower()
    assert prose.ceilings() == {"pages": 7, "packages": 8}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Make a repository of one commit, with ceilings; returns a function that commits."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "CEILINGS", tmp_path / "prose.json")
    user = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")

    def commit(subject, **ceilings):
        prose.CEILINGS.write_text(json.dumps(ceilings))
        for arguments in (("add", "."), ("commit", "--quiet", "--allow-empty", "-m", subject)):
            subprocess.run(["git", *user, *arguments], cwd=tmp_path, check=True)

    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    commit("First", pages=5)
    return commit


def test_commits_of_a_change_have_short_subjects_and_raise_no_ceiling(repository, capsys):
    assert prose.check_commits(None) == 0
    repository("s" * 72, pages=4)
    assert prose.check_commits(None) == 0
    repository("s" * 73, pages=4)
    repository("Raise", pages=6)
    assert prose.check_commits(None) == 1
    assert capsys.readouterr().out == "prose.json: pages was raised\n"
    assert prose.check_commits("HEAD~3") == 1
    long, higher = capsys.readouterr().out.splitlines()
    assert long == f"subject over 72 columns: {'s' * 73}"
    assert higher == "prose.json: pages was raised"
