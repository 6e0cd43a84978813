"""(see the design card in CONTRIBUTING)."""
