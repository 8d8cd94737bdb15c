"""Pretrained models whose embeddings of images agents read; registered by name."""
