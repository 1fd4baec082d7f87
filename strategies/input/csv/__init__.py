"""Records of CSV files as tensors: lines joined to records, and decoded."""

from strategies.input.csv.parser import decode_csv

__all__ = ["decode_csv"]
