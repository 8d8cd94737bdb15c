"""Building blocks of protocol scenarios: agents with networks, environments."""
