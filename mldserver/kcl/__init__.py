"""Runs the real Java MultiLangDaemon for the server: ``mldserver kcl``.

``properties.py`` and ``log_filter.py`` are synchronous cores: the daemon's settings as text, and its log as events that are
worth reading. ``launch.py`` finds Java, jars and bridge on this machine and puts the command together, ``supervisor.py``
keeps the process alive, ``worker.py`` holds its name and releases the leader's lock of a process that died.
"""
