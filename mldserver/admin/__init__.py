"""See, steer and secure a running server: its status, and the endpoint that shows it, in a separate process."""
