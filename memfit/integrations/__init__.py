"""Adapters for other training libraries. Each is imported only where it is used."""
