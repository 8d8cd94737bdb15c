"""Parts of the backend that samples with vLLM."""
