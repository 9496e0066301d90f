"""`qsdp tune`: bit widths for every parameter, from what quantizing each of them does."""
