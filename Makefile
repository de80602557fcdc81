# make demo      install into .venv and run the main job (the only commands needed are python3 >= 3.11 and make)
# make test      install the test extras into .venv and run the whole suite; ARGS="-k disk" passes options to pytest
# make check     ruff, mypy (strict) and pyright
# make sanitize  on a GPU: random programs under delays, torch's stream sanitizer, compute-sanitizer if it is there
# make docs      build the documentation into site/; warnings are errors
# make clean     remove .venv and everything built
#
# PYTHON=python3.12          the interpreter that .venv is made from
# VENV=/some/where           another place for .venv
# SYSTEM_SITE=1              use the packages that PYTHON already has (a CUDA build of torch, say) and install only what
#                            lacks, without pins; without a package index the checkout is only put on the path

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

is_new_enough := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python,\
            $(shell command -v $(p) >/dev/null 2>&1 && $(p) $(is_new_enough) 2>/dev/null && echo $(p))))
VENV ?= .venv
ARGS ?=

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check

ifeq ($(SYSTEM_SITE),1)
share_packages = $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	> "$$($(bin)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
link_checkout = $(bin)/python -c 'import pathlib, sysconfig; \
	pathlib.Path(sysconfig.get_path("purelib"), "tidegate.pth").write_text(str(pathlib.Path("src").resolve()))'
install = $(pip) install --retries 1 -e '.[$(1)]' || { \
	echo "Not everything could be installed: going on with the packages of $(PYTHON)."; $(link_checkout); }
else
share_packages = :
install = $(pip) install -c constraints.txt -e '.[$(1)]'
endif

.PHONY: help
help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "tidegate needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(share_packages)
	touch $@

$(VENV)/.installed-%: $(VENV)/.made pyproject.toml constraints.txt
	$(call install,$*)
	touch $@

.PHONY: demo
demo: $(VENV)/.installed-lightning
	$(bin)/python examples/train_gpt_lightning.py $(ARGS)

.PHONY: test
test: $(VENV)/.installed-dev
	$(bin)/python -m pytest $(ARGS)

.PHONY: check
check: $(VENV)/.installed-dev
	$(bin)/python -m ruff check .
	$(bin)/python -m ruff format --check .
	$(bin)/python -m mypy
	$(bin)/python -m pyright --pythonpath $(bin)/python

.PHONY: sanitize
sanitize: $(VENV)/.installed-dev
	$(bin)/python -m pytest tests/gpu/test_transfer_fuzz.py tests/gpu/test_sanitizers.py $(ARGS)

.PHONY: docs
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --strict --quiet

.PHONY: wheel
wheel: $(VENV)/.installed-dev
	rm -rf dist
	$(bin)/python -m build --outdir dist .

.PHONY: print-python
print-python:
	@echo $(PYTHON)

.PHONY: clean
clean:
	rm -rf $(VENV) build dist site .pytest_cache .hypothesis .mypy_cache .ruff_cache lightning_logs checkpoints
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
