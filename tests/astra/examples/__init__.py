"""Programs like ASTRA-RL's examples, ported only as the guide says, on models made by the tests."""
