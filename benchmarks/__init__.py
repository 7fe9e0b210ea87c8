"""Benchmarks: same accuracy, same run, ratios."""
