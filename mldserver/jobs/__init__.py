"""From a cut window to a committed output, through an engine."""
