"""Interaction protocols: who says what when, who decides, and what it is worth to whom."""
