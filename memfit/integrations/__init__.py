"""Guests: other libraries' ways of training, with memfit inside. Each is imported only where it is used."""
