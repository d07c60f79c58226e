"""A catalogue of what the MultiLangDaemon may say to a child, and a judge of how the child takes it."""
