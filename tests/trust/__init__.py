"""Attacks on the promises, and the page of figures that they end in."""
