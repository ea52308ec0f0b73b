"""Environments of other packages as this package's; each module here wraps one package, and is imported where it is asked for."""
