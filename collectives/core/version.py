"""The version, apart from the package's names, so that what they are made of can tell it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
