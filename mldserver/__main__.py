"""``python -m mldserver`` is ``mldserver``."""

from mldserver.cli import main

main()
