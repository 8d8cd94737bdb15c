"""What an experiment will be: its resolved parameters, base runs, parameters that nothing reads."""
