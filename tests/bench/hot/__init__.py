"""The hot path: the server against amazon_kclpy, a raw uvloop echo and the bare decode, on the same lines."""
