"""Record processors written for amazon_kclpy, run unchanged: one instance a shard, its checkpointer included."""
