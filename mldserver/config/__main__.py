"""``python -m mldserver.config > mldserver/docs/settings.md`` writes the page of settings."""

import sys

from mldserver.config.settings_page import settings_page

sys.stdout.write(settings_page())
