# Each target makes .venv itself when it is missing or out of date.
PYTHON ?= $(shell for p in python3.12 python3.13 python3; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; \
	then echo $$p; break; fi; done)
RUN = .venv/bin/python
WORKDIR ?= runs/demo

.PHONY: demo test test-slow lint bench clean

demo: .venv/ready
	$(RUN) -m experiments.train --config=experiments/configs/tiny.py \
	  --workdir=$(WORKDIR)

test: .venv/ready
	$(RUN) -m pytest

test-slow: .venv/ready
	$(RUN) -m pytest -m slow

lint: .venv/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

bench: .venv/ready
	$(RUN) -m experiments.bench

.venv/ready: setup.cfg pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'TriMoE needs Python 3.12 or newer and found \
	none (tried python3.12, python3.13, python3). Install Python 3.12, or name \
	one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12'; exit 1; }
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --constraint constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv runs build *.egg-info
