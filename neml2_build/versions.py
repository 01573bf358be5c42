"""Versions of what each stage makes of the same inputs. Raised when that changes: old results are then no hits."""

PARSE = 1
EXPORT = 2
LOWER = 1
CROSS = 1
