"""Reporting: a report as a value, and its views. Nothing here measures or decides."""
