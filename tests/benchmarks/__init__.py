"""The benchmarks run, and compare equal computations."""
