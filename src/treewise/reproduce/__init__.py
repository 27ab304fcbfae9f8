"""Regenerates published tables and figures on the machine at hand: measurements, and one report of them."""
