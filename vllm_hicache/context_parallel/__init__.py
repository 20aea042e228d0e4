"""Attention over a context whose pages lie on several ranks. Needs torch; `backend` alone knows vLLM."""
