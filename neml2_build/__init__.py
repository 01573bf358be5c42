"""Incremental builds of NEML2 material models."""

__version__ = "0.1.0"
