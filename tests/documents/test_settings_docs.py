"""The page of settings has every variable that is read, with its default."""

import re

from collectives.core import settings
from launcher import ROOT

PAGE = (ROOT / "docs" / "settings.md").read_text()
ROWS = dict(re.findall(r"^\| `(UNISONO_\w+)` \|[^|]*\| ([^|]*?) \|", PAGE, re.MULTILINE))


def test_every_variable_has_a_row_and_no_other_has():
    assert set(ROWS) == set(settings.VARIABLES)


def test_what_the_page_calls_the_default_changes_nothing():
    plain = settings.from_environment({})
    said = {
        name: told.strip("`") for name, told in ROWS.items() if re.fullmatch(r"`?[\w/]+`?", told)
    }
    said = {name: told for name, told in said.items() if told != "none"}
    assert {"UNISONO_TIMEOUT", "UNISONO_CHECK", "UNISONO_SHARED_MEMORY", "UNISONO_STORES"} <= set(
        said
    )
    assert settings.from_environment(said) == plain


def test_the_words_that_the_page_lists_are_those_that_are_read():
    closed = 0
    for name, values in re.findall(r"^\| `(UNISONO_\w+)` \| ([^|]*?) \|", PAGE, re.MULTILINE):
        try:
            settings.from_environment({name: "?"})
        except ValueError as error:
            if "must be one of" in str(error):
                words = re.findall(r"one of (.*), got", str(error))[0].split()
                assert re.findall(r"`(\w+)`", values) == words, name
                closed += 1
    assert closed == 5
