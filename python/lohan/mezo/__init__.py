"""Zeroth-order training (method="mezo"): sessions, turns of several forwards, devices."""
