"""Turns work into a plan: profiles, times and searches, and measures further while training."""
