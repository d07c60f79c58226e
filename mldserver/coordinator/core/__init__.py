"""The coordinator's pure cores: no event loop, no clock, no I/O."""
