# Every target makes .venv itself when it is missing or out of date.
PYTHON ?= $(shell for p in python3.12 python3.13 python3; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; \
	then echo $$p; break; fi; done)
RUN = .venv/bin/python
WORKDIR ?= runs/demo
# Without an accelerator JAX need not look for one (libtpu complains at length).
PLATFORM := $(if $(wildcard /dev/accel* /dev/vfio/[0-9]* /dev/nvidia[0-9]*),,\
	JAX_PLATFORMS=cpu)

.PHONY: demo test test-slow test-compile lint bench clean

demo: .venv/ready
	$(PLATFORM) $(RUN) -m experiments.train \
	  --config=experiments/configs/tiny.py --workdir=$(WORKDIR)

test: .venv/dev
	$(RUN) -m pytest -n 2 --dist loadfile --durations=25

test-slow: .venv/dev
	$(RUN) -m pytest -m slow

# A whole training step of `mini` for four chips of v6e; minutes, no TPU.
test-compile: .venv/dev
	$(RUN) -m pytest -m 'tpu_compile and slow' \
	  tests/trimoe_jax/test_compile_checks.py

lint: .venv/dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

bench: .venv/ready
	for verb in kda attention_residual quantile_router grouped_matmul; do \
	  $(PLATFORM) $(RUN) -m experiments.bench $$verb || exit 1; done

.venv/ready: setup.cfg pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'TriMoE needs Python 3.12 or newer and found \
	none (tried python3.12, python3.13, python3). Install Python 3.12, or name \
	one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12'; exit 1; }
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --constraint constraints.txt -e .
	@touch $@

.venv/dev: .venv/ready
	$(RUN) -m pip install --quiet --constraint constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv runs build *.egg-info
