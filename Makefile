# What a person can do in a clone. Every target installs what it needs, the first time.
SHELL := /bin/bash
.DEFAULT_GOAL := help
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
APT_INSTALL := $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends
VENV := .venv
PYTHON := $(VENV)/bin/python

.PHONY: help install demo demo-down test check fix vm bench-server bench-soak bench-probe bench-verify bench-rerun bench-plan bench-report lock clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.control ## Make .venv with pyinfra and all that edgellm needs

demo: $(VENV)/.control .cache/.demo-packages ## Boot three real hosts here, roll out to them, roll out again, leave them up
	$(SUDO) $(PYTHON) -m demo.fleet up
	$(PYTHON) -m demo.tour

demo-down: $(VENV)/.control ## End the demo's hosts and remove all that they left
	$(SUDO) $(PYTHON) -m demo.fleet down

test: $(VENV)/.dev .cache/.demo-packages .cache/.test-packages ## Run every test, those on real hosts included (as root)
	$(SUDO) $(PYTHON) -m pytest --ignore=tests/vm

vm: $(VENV)/.dev .cache/.vm-packages ## Roll out to one emulated arm64 machine: big.LITTLE, NUMA, zram, cgroup v2 (slow)
	$(SUDO) $(PYTHON) -m pytest tests/vm

bench-server: $(VENV)/.dev ## Measure the server against the common way (FastAPI + transformers) on this machine
	$(SUDO) $(PYTHON) -m bench.server $(ARGS)

bench-soak: $(VENV)/.dev ## Half an hour of clients that misbehave: leaks, stuck slots, wrong answers
	$(SUDO) $(PYTHON) -m bench.soak $(ARGS)

bench-rerun: $(VENV)/.dev .cache/.demo-packages ## Measure an unchanged roll-out against the same tasks in Ansible, and drift repair
	$(SUDO) $(PYTHON) -m bench.rerun $(ARGS)

bench-plan: $(VENV)/.dev ## Measure what the plans and files of 1,000 hosts cost to make
	$(PYTHON) -m bench.plan_cost $(ARGS)

bench-report: $(VENV)/.dev .cache/.test-packages ## Measure the page of 1,000 hosts: its size, and sorting it in Chromium
	$(PYTHON) -m bench.report $(ARGS)

bench-probe: $(VENV)/.dev ## Measure the smoke test's stopwatch against the packets on the wire
	$(SUDO) $(PYTHON) -m bench.probe_accuracy $(ARGS)

bench-verify: $(VENV)/.dev .cache/.demo-packages ## Measure what a verification costs, and interrupt roll-outs at random
	$(SUDO) $(PYTHON) -m bench.verification $(ARGS)

check: $(VENV)/.dev ## Lint, format and types, as CI does
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

fix: $(VENV)/.dev ## Let ruff mend and format what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

lock: $(VENV)/.dev ## Pin the newest versions that pyproject.toml allows, with hashes
	$(PYTHON) -m pip install -q uv
	$(VENV)/bin/uv pip compile $(LOCK) --universal pyproject.toml -o requirements/control.txt
	$(VENV)/bin/uv pip compile $(LOCK) --python-platform x86_64-manylinux_2_28 --group pyproject.toml:host -o requirements/host.txt
	# torch by itself, with whatever CUDA its build wants: requirements/bench-torch.txt
	$(VENV)/bin/uv pip compile $(LOCK) --universal --constraint requirements/bench-torch.txt requirements/bench.in $(NOT_LOCKED:%=--no-emit-package %) -o requirements/bench.txt
	$(VENV)/bin/uv pip compile $(LOCK) --universal requirements/bench-ansible.in -o requirements/bench-ansible.txt
	# What the tests run is what the hosts run
	$(VENV)/bin/uv pip compile $(LOCK) --universal --constraint requirements/host.txt pyproject.toml --group test --group check --group host -o requirements/dev.txt
LOCK := -q --upgrade --python-version 3.10 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate
NOT_LOCKED := torch triton $(addprefix cuda-,bindings pathfinder toolkit) $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)

clean: demo-down ## Also remove images, models, runtimes and the environment of this clone
	$(SUDO) rm -rf .cache .demo reports $(VENV)

# --- what the targets stand on; each is made once -------------------------------------------------

$(VENV)/bin/python:
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "edgellm needs python3 3.10 or newer; this is $$(python3 -V)"; exit 1; }
	@python3 -c 'import venv, ensurepip' 2>/dev/null || { $(SUDO) apt-get update -q && $(APT_INSTALL) python3-venv; }
	python3 -m venv $(VENV)

$(VENV)/.control: requirements/control.txt | $(VENV)/bin/python
	$(PYTHON) -m pip install -q --disable-pip-version-check --require-hashes -r $<
	@touch $@

$(VENV)/.dev: requirements/dev.txt | $(VENV)/bin/python
	$(PYTHON) -m pip install -q --disable-pip-version-check --require-hashes -r $<
	@touch $@ $(VENV)/.control

.cache/.demo-packages: demo/machine.py | $(VENV)/bin/python
	$(call install_missing,$(PYTHON) -m demo.fleet packages)

.cache/.vm-packages: demo/arm64_machine.py | $(VENV)/bin/python
	$(call install_missing,$(PYTHON) -m demo.arm64_machine packages)

# systemd-analyze reads the rendered units; chromium looks at the chat page and at the report
.cache/.test-packages: Makefile
	$(call install_missing,echo systemd chromium)

# The Debian packages that a command prints, those of them that are not there
define install_missing
	@mkdir -p .cache
	@missing=$$(for package in $$($(1)); do dpkg -s $$package >/dev/null 2>&1 || echo $$package; done); \
	if [ -n "$$missing" ]; then $(SUDO) apt-get update -q && $(APT_INSTALL) $$missing; fi
	@touch $@
endef
