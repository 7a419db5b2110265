# SPDX-License-Identifier: Apache-2.0
# One command for each thing that is done often: `just` lists them (https://just.systems).
# `.ci/run` does all of it from nothing, in a fresh virtual environment.

default:
    @just --list

# Run the tests, as the README does
test *arguments:
    pytest {{arguments}}

# Format, lint, check types and import contracts
check:
    ruff format .
    ruff check .
    mypy -p openenvd
    mypy tests load_tests smoke_tests
    lint-imports

# Run the installed command against a real daemon and upstream's client
smoke:
    pytest -n 3 --dist loadgroup --timeout 300 smoke_tests --ignore smoke_tests/providers --ignore smoke_tests/kubernetes --ignore smoke_tests/dashboard
    pytest -n 0 smoke_tests/dashboard

# Run the short form of every load test
load:
    python -m load_tests.run_short

# Renew the documentation's pictures of the dashboard
pictures:
    OPENENVD_SCREENSHOTS=docs/images pytest -n 0 smoke_tests/dashboard -k pictures

# Run the examples that need TRL or verl, which bring torch, in a virtual environment of their own
training:
    bash .ci/run training

# Build the documentation into site/
docs:
    mkdocs build --strict

# Serve the documentation on loopback, rebuilt as it changes
docs-serve:
    mkdocs serve

# Measure line coverage, with the processes that tests start
coverage:
    pytest --cov --cov-report=term:skip-covered

# Everything, from nothing: what must be green
ci *stages:
    bash .ci/run {{stages}}
