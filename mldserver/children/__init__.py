"""Child processes: how they are started, spoken with, read and ended. Knows nothing of what they do."""
