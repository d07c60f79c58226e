"""Where shards come from: the MultiLangDaemon over TCP or a Unix socket."""
