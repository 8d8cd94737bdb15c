"""Alias of `nip_astra.astra.scorers`."""
