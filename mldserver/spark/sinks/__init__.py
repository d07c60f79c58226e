"""Table sinks: what ``sink = delta:…``, ``iceberg:…`` and ``jdbc:…`` do with a window's committed output."""
