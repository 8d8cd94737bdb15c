"""Programs as ASTRA-RL's examples are, ported by the guide alone, on models made by the tests."""
