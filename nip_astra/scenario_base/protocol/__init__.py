"""What scenarios of interaction protocols are made of: agents with networks, environments."""
