"""How runs of each family are evaluated, scored, compared and exported."""
