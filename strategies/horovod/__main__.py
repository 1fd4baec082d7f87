"""Runs an unchanged Horovod program with this package in place of horovod.

    mpirun -np 4 python -m strategies.horovod train.py ARGUMENTS
    mpirun -np 4 python -m strategies.horovod -m package.train ARGUMENTS

Horovod need not be installed.
"""

import sys

from strategies.core import run_program
from strategies.horovod import import_hook

if __name__ == "__main__":
    sys.exit(run_program.run(sys.argv[1:], __doc__, import_hook.install))
