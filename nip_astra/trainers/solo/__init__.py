"""Parts of trainers that train one agent alone."""
