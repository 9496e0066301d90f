"""`qsdp sweep`: a grid of configurations and seeds, trained one after another and compared."""
