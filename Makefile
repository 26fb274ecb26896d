# Every verb does the set-up it needs; what is done already is not done again (stamps in .venv and build/).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
BIN := .venv/bin
CMAKE := $(BIN)/cmake
LIBRARY := dlfs/_native/libdlfs.so
NATIVE := native/CMakeLists.txt $(wildcard native/include/dlfs/*.h native/src/*)
C_FILES := $(wildcard native/include/dlfs/*.h native/src/*.[ch] native/tests/*.[ch] native/tests/planted/*.c)
TIDY := $(patsubst native/src/%.c,build/tidy/%.ok,$(wildcard native/src/*.c))
JOBS ?= $(shell nproc)

# What make test and make demo need from Debian or Ubuntu: a program or header to look for, and its package.
APT := gcc:gcc pkg-config:pkg-config fusermount3:fuse3 setfattr:attr \
	clang-tidy:clang-tidy
APT_HEADERS := stdlib.h:libc6-dev liburing.h:liburing-dev fuse3/fuse.h:libfuse3-dev

.PHONY: help setup build test demo lint bench clean format

help: ## show this
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1	\2/p' $(MAKEFILE_LIST) | \
	    while IFS=$$'\t' read -r verb what; do printf '  make %-8s %s\n' "$$verb" "$$what"; done

setup: .venv/.stamp ## Debian packages, the virtual environment, the Python packages

build: $(LIBRARY) ## libdlfs, into the package

test: lint ## everything: lint, then all tests
	$(BIN)/pytest $(PYTEST_ARGS)

demo: build ## real images: import, verify, mount, train
	$(BIN)/dlfs demo

lint: build ## ruff, mypy, import-linter, clang-format, clang-tidy
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	@$(MAKE) --jobs=$(JOBS) $(TIDY)

format: setup ## rewrite Python and C files in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/clang-format -i $(C_FILES)

bench: build ## measure: see bench/README.md
	$(BIN)/python -m bench $(BENCH_ARGS)

clean: ## remove what was built, and the virtual environment
	rm -rf build dist .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(LIBRARY)

# ---- stamps ----

.venv/.packages:
	@missing=""; \
	for pair in $(APT); do command -v "$${pair%%:*}" >/dev/null || missing="$$missing $${pair##*:}"; done; \
	for pair in $(APT_HEADERS); do \
	    [ -e "/usr/include/$${pair%%:*}" ] || missing="$$missing $${pair##*:}"; done; \
	if ! command -v $(PYTHON) >/dev/null; then missing="$$missing python3 python3-venv python3-dev"; else \
	    $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	    $(PYTHON) -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' \
	        2>/dev/null || missing="$$missing python3-dev"; \
	fi; \
	if [ -z "$$missing" ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing$$missing"; \
	    apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null; \
	else \
	    echo "Some packages are missing. Please run:"; \
	    echo "    sudo apt-get install -y$$missing"; \
	    exit 1; \
	fi; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "DLFS needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	    echo "Name another one with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@mkdir -p .venv && touch $@

.venv/.stamp: pyproject.toml .venv/.packages
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# Written beside and renamed, so that a process that has the old library mapped keeps it.
$(LIBRARY): .venv/.stamp $(NATIVE)
	@$(CMAKE) -S native -B build/native --log-level=WARNING -DCMAKE_BUILD_TYPE=Release -DDLFS_TESTS=OFF
	$(CMAKE) --build build/native --parallel $(JOBS)
	@cp build/native/libdlfs.so $@.new && mv $@.new $@

build/tidy/%.ok: native/src/%.c $(wildcard native/src/*.h native/include/dlfs/*.h) native/.clang-tidy
	@mkdir -p build/tidy
	clang-tidy --quiet -p build/native $< 2>/dev/null
	@touch $@
