"""Public test tools: a daemon that speaks the real protocol, a small engine, a virtual clock."""
