"""Parts of the loop that all trainers of language models go through."""
