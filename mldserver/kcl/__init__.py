"""Runs the real Java MultiLangDaemon beside the server: ``mldserver kcl``.

``properties.py``, ``java_log.py`` and ``digest.py`` are synchronous cores: the daemon's settings as text, its log lines as
events, and what of them is worth reading. ``launch.py`` and ``bridge.py`` find Java, jars and bridge on this machine and put
the command together, ``supervisor.py`` keeps the process alive.
"""
