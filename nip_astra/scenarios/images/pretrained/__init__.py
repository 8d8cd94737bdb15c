"""Pretrained image embeddings that agents read; registered by name."""
