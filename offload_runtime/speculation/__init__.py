"""Propose / verify steps: a drafter guesses tokens, one target pass checks them, equality decides."""
