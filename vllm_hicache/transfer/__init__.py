"""Moves pages between the device cache, the host pool and the store. Needs torch, knows nothing of vLLM."""
