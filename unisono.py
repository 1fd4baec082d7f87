"""The name of the project, which is not a module: says what to import instead."""

raise ImportError(
    "unisono: the project is called so, its packages are not, expected `import collectives as cc` "
    "(operations on arrays among ranks) or `import strategies` (training)"
)
