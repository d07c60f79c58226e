"""The coordinator's fixtures: a pipeline whose blocking calls run on the loop."""

from coordinator.conftest import no_threads, pipeline

__all__ = ["no_threads", "pipeline"]
