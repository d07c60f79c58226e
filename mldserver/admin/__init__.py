"""Shows and steers a running server: its status, and the endpoint that clients ask."""
