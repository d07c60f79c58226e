"""The Spark driver process, its jobs, and the client that supervises it."""
