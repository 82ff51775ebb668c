"""Compiled kernels, each behind a small interface and beside a reference in plain torch."""
