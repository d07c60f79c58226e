"""A pipeline's output folder: what lies where, what is published, what is swept."""
