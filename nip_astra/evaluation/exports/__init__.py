"""Write an evaluation down in the formats of other tools."""
