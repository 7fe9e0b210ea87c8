"""Engines: ways to multiply one chunk's curvature with vectors, and the choice among them."""
