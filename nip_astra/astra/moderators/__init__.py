"""The older home of `nip_astra.astra.scorers`."""
