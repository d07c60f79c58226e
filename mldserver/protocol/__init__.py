"""The MultiLangDaemon protocol: bytes to messages, messages to bytes, and the state machine. No event loop."""
