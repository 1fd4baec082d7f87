"""`python -m collectives`: info, check, bench, tune, each in a file of its name."""
