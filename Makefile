# Everything works on a fresh clone: `make serve` needs Python 3.11 or newer and a C++ compiler, nothing else; `make test` also
# Chromium, npm, and a compiler and an emulator for aarch64, which it installs where apt-get may.
# ARGS is handed on: make serve ARGS="--port 9000 --model Qwen/Qwen3-0.6B"

PYTHON ?= python3
ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt

# What is installed leaves a stamp, so that a second `make` does nothing.
INSTALLED := $(VENV)/.installed
DEVELOPMENT := $(VENV)/.installed-development
# What those depend on, which needs no library: `make --jobs=2 development` installs it while the library is compiled.
# Not compiled: the tests import a small part of the modules, and Python compiles these when it does.
DEPENDENCIES := $(VENV)/.installed-dependencies
# Chromium and axe-core, which the tests of the chat page need. Without them there is no stamp, and those tests fail.
BROWSER := $(VENV)/.installed-browser
# What the tests of the kernels for aarch64 need elsewhere; likewise.
AARCH64 := $(VENV)/.installed-aarch64
# What builds the site of the documentation.
SITE := $(VENV)/.installed-docs
KERNELS := pagewick/kernels/cpu
LIBRARY := $(KERNELS)/libpagewick_cpu.so
METADATA := pyproject.toml setup.py constraints.txt pagewick/__init__.py

# A terminal sends Ctrl-C to all of its foreground process group; make would die of it, whatever the server makes of it.
# So the program becomes that group (set -m), if there is a terminal and it is ours; if make is killed, so is the program.
define in_foreground
@read -r _ _ _ _ group _ _ foreground _ < /proc/$$$$/stat || group=none; \
if [ "$${group}" = "$${foreground:-}" ] && command -v setpriv > /dev/null; \
then set -m; setpriv --pdeathsig TERM $(1); \
else exec $(1); \
fi
endef

.PHONY: help install serve chat complete test development tools lint types docs structs vendor bench clients wheel wheel-check clean

help:  ## Show this list.
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 20

install: $(LIBRARY) $(INSTALLED)  ## Create .venv, install Pagewick into it and build the native library.

serve: install  ## Start the server on 127.0.0.1:8000 with the built-in model.
	$(call in_foreground,$(BIN)/pagewick serve $(ARGS))

chat: install  ## Talk to the built-in model in the terminal.
	$(call in_foreground,$(BIN)/pagewick chat $(ARGS))

complete: install  ## Complete prompts: make complete ARGS='--prompts "a | b"'.
	@exec $(BIN)/pagewick complete $(ARGS)

test: $(LIBRARY) $(DEVELOPMENT) $(BROWSER) $(AARCH64)  ## Install what the tests need and run them, on all cores.
	$(BIN)/python -m pytest -n logical --maxprocesses 8 $(ARGS)

development: $(DEVELOPMENT)  ## Create .venv with everything that the tests need but the browser; --jobs=2 is faster.

tools: $(BROWSER) $(AARCH64)  ## Install what the tests need that is no Python package, with apt-get and npm.

lint: $(DEVELOPMENT)  ## Check style and format.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEVELOPMENT)  ## Check types.
	$(BIN)/mypy

docs: $(SITE)  ## Build the documentation as a site into build/site/, and check its links.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

structs: $(BIN)/python  ## Generate the Python side of the native library's C ABI from its headers.
	@$(BIN)/python $(KERNELS)/structs_from_headers.py

vendor:  ## Fetch the pinned libraries of the chat page and write them to pagewick/server/page/vendor/.
	@vendor/update

bench: $(LIBRARY) $(DEVELOPMENT)  ## Measure tokens per second beside transformers, in one run.
	$(BIN)/python -m benchmarks.compare_transformers $(ARGS)

clients: install  ## Try other people's clients: make clients ARGS="litellm llm".
	@tests/clients/run_all.sh $(ARGS)

wheel: $(INSTALLED)  ## Build a wheel with the native library inside, into dist/.
	rm -rf build dist
	PAGEWICK_REQUIRE_NATIVE=1 $(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps -w dist .
	@ls dist/*.whl

wheel-check: wheel $(DEVELOPMENT)  ## Audit the wheel, install it where there is no compiler, and run it.
	@$(BIN)/python -m auditwheel show dist/*.whl | tr '\n' ' ' | grep -o 'consistent with [^"]*"manylinux_[^"]*"'
	.ci/wheel-check dist/*.whl

clean:  ## Remove everything that make has made.
	rm -rf $(VENV) build dist *.egg-info $(KERNELS)/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find pagewick tests benchmarks training -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || { echo "error: there is no $(PYTHON); install Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: Pagewick needs Python 3.11 or newer and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
			"name another one: make PYTHON=python3.12 install"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "error: $(PYTHON) cannot make virtual environments (Debian: apt install python3-venv)"; exit 1; }

$(INSTALLED): $(METADATA) | $(LIBRARY)
	@echo "installing Pagewick into $(VENV) (PyTorch is large: this takes some minutes the first time)"
	@$(PIP) -e .
	@touch $@

$(DEPENDENCIES): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what Pagewick and its tests need into $(VENV)"
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		extras = project["optional-dependencies"]; \
		print(*project["dependencies"], *extras["test"], *extras["lint"], sep="\n")' > $(VENV)/requirements.txt
	@$(PIP) --no-compile -r $(VENV)/requirements.txt
	@touch $@

$(DEVELOPMENT): $(METADATA) | $(LIBRARY) $(DEPENDENCIES)
	@$(PIP) -e '.[test,lint]'
	@touch $(INSTALLED) $@

$(SITE): constraints.txt | $(BIN)/python
	@$(PIP) mkdocs-material
	@touch $@

$(BROWSER): tests/page/install-browser tests/page/package-lock.json | $(BIN)/python
	@tests/page/install-browser $(VENV) $@

# After the browser: apt-get refuses to run twice at a time.
$(AARCH64): tests/kernels/native/install-aarch64 | $(BROWSER)
	@tests/kernels/native/install-aarch64 $@

# Before the package: its own build then finds the library done.
$(LIBRARY): $(KERNELS)/build.py $(wildcard $(KERNELS)/csrc/*) | $(BIN)/python
	@PYTHONPATH=. $(BIN)/python $(KERNELS)/build.py \
		|| { rm -f $@; echo "warning: no native library; Pagewick will use its reference kernels"; }
