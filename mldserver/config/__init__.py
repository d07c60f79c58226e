"""Every setting: command line > environment ``MLDSERVER_…`` > ``mldserver.toml`` > default.

``settings.py`` is the one table that options, variable names, TOML keys and the page of settings follow, in sections that
parts take as they are; ``kinds.py`` and ``locations.py`` say what values may look like; ``raw.py`` reads files and variables;
``resolve.py`` puts the sources in order and remembers where each value came from, for each function of a server.
"""
