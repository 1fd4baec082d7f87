"""CSV records as tensors: record splitting and decoding."""

from strategies.input.csv.parser import decode_csv

__all__ = ["decode_csv"]
