"""Models, scenarios, services and runs that several tests use."""
