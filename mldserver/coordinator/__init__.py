"""Merge, watermark, windows, positions, flush: synchronous cores under one async shell."""
