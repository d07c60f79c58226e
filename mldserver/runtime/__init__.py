"""Where handlers run: loading, checking, calling them, and turning what they return into rows."""
