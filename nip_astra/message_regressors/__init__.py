"""What reads labels off messages: one file a kind."""
