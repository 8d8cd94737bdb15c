"""vLLM engines, in this process and in Ray actors."""
