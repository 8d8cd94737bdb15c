"""Forward passes over trees of tokens, in which shared prefixes are computed once."""
