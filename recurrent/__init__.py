"""Gated delta layers, whose memory of the text is a matrix per head instead of a cache of rows."""
