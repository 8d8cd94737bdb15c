"""The benchmarks run, and what they compare is the same."""
