# The commands of .github/CONTRIBUTING.md. They use the active virtual environment.

_list:
    @just --list --unsorted

# ruff and mypy
check:
    python3 -m ruff check .
    python3 -m ruff format --check .
    python3 -m mypy

# the quick lane: cores and codecs, under a minute
quick *options:
    python3 -m pytest -m quick {{ options }}

# the day lane, as CI runs it
day *options:
    python3 -m pytest {{ options }}

# the services lane: Spark clusters, S3, PostgreSQL, a browser
services *options:
    python3 -m pytest -m services {{ options }}

# the long lane: soak
long *options:
    python3 -m pytest --long {{ options }}

# fail unless the pure cores' own tests cover them 100 %
cover *options:
    python3 -m pytest -p no:mldserver -m "core and not hypothesis" --cov {{ options }}

# write the generated pages of mldserver/docs again
pages:
    PYTHONPATH=tests python3 -m support.generated
