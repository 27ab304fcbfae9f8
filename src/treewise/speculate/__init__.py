"""Speculative decoding: drafters guess how leaves go on, and one forward tells which guesses were right."""
