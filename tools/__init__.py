"""The command lines: flags, loading, printing, comparing, timing, and the server."""
