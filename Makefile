# Every target does the set-up that it needs, once: stamps in .venv and build/ record finished steps.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# The tests start Python thousands of times: compiled modules are stored, even where the environment forbids it.
unexport PYTHONDONTWRITEBYTECODE

# The first Python that is new enough, or python3, for which a later step prints an error.
PYTHON := $(or $(PYTHON),$(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; \
	done),python3)
BIN := .venv/bin
CMAKE := $(BIN)/cmake
# pip need not compile all modules: Python compiles those that it imports.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
LIBRARY := dlfs/_native/libdlfs.so
SPDK_LIBRARY := dlfs/_native/libdlfs_spdk.so
FUSE_LIBRARY := dlfs/_native/libdlfs_fuse.so
SECURITY_LIBRARY := dlfs/_native/libdlfs_security.so
FAULT_LIBRARY := build/native/tests/libdlfs_fault.so
SPDK_MODULES := spdk_nvme spdk_env_dpdk spdk_sock_modules spdk_syslibs
# "yes" where pkg-config finds SPDK; PKG_CONFIG_PATH adds folders to its search.
SPDK := $(shell pkg-config --exists $(SPDK_MODULES) 2>/dev/null && echo yes)
# The library for authentication and TLS is built if OpenSSL 3's headers are found.
HAS_OPENSSL := pkg-config --exists 'libssl >= 3' 2>/dev/null && echo yes
NATIVE := native/CMakeLists.txt $(filter-out native/src/security/%,$(wildcard native/include/dlfs/*.h native/src/*.map native/src/*/*.[ch] native/src/*/*/*.[ch]))
C_FILES := $(wildcard native/include/dlfs/*.h native/src/*/*.[ch] native/src/*/*/*.[ch] native/spdk/*.[ch] native/fuse/*.[ch] native/fuse/*/*.[ch] native/tests/*.h native/tests/*/*.[ch] \
	native/fuzz/*.c native/examples/*.c bench/native/*.[ch])
# Most paths that the analyzer follows in a function. "make test" asks for fewer: the rest takes three times the time.
TIDY_NODES ?= 225000
TIDY_FOLDER = build/tidy-$(TIDY_NODES)
TIDY_SOURCES := $(filter-out native/src/security/%,$(wildcard native/src/*/*.c native/src/*/*/*.c)) $(wildcard native/fuse/*.c native/fuse/*/*.c) \
	$(if $(shell $(HAS_OPENSSL)),$(wildcard native/src/security/*.c)) $(if $(SPDK),$(wildcard native/spdk/*.c))
TIDY = $(patsubst native/%.c,$(TIDY_FOLDER)/%.ok,$(TIDY_SOURCES))
JOBS ?= $(shell nproc)

# Packages of Debian or Ubuntu, each behind a program or header that shows that it is installed. libfuse3-dev is for pyfuse3,
# which the virtual environment has for tests, and of which there is no wheel.
APT_BUILD := gcc:gcc pkg-config:pkg-config fusermount3:fuse3 \
	/usr/include/stdlib.h:libc6-dev /usr/include/liburing.h:liburing-dev \
	/usr/include/openssl/ssl.h:libssl-dev /usr/include/fuse3/fuse.h:libfuse3-dev
APT_TEST := clang-tidy:clang-tidy getfattr:attr rsync:rsync qemu-system-x86_64:qemu-system-x86 busybox:busybox-static \
	clang:clang /usr/share/doc/libclang-rt-dev/copyright:libclang-rt-dev

APT_SLURM := slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge ip:iproute2

# Packages for make bench, which lists the missing ones and does not install them.
APT_BENCH := fio:fio mksquashfs:squashfs-tools squashfuse_ll:squashfuse mkfs.erofs:erofs-utils perf:linux-perf \
	nginx:nginx-light /usr/src/linux-source-6.1.tar.xz:linux-source-6.1
# qemu-user runs the wheel of another architecture.
APT_RELEASE := git:git qemu-aarch64-static:qemu-user-static
APT_JUPYTERHUB := $(APT_SLURM) npm:npm chromium:chromium useradd:passwd curl:curl fusermount3:fuse3
APT_CONTAINERS := podman:podman runc:runc jq:jq
APT_IMAGE := buildah:buildah debootstrap:debootstrap
APT_DLIO := mpirun:openmpi-bin mpicc:libopenmpi-dev

# Test processes (tests/scheduling.py): two more than there are CPUs, because many tests wait.
WORKERS ?= $(shell expr $$(nproc) + 2)
# Python packages to install in addition, such as torch. Without torch its tests are skipped.
PACKAGES ?=
# For the hub of make test-jupyterhub: a Python that every user may run.
HUB_PYTHON ?= /usr/bin/python3
# Such as --keep, or --dir DIR.
DEMO_ARGS ?=

.PHONY: help setup build test pytest test-examples test-slurm test-containers test-jupyterhub demo lint lint-quick lint-slow mypy bench bench-dlio docs wheel image release release-check clean format .venv/.extra

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1	\2/p' $(MAKEFILE_LIST) | \
	    while IFS=$$'\t' read -r verb what; do printf '  make %-15s %s\n' "$$verb" "$$what"; done

setup: .venv/.stamp ## Debian packages, the virtual environment, the Python packages

# The SPDK library and authentication are built as well where pkg-config finds SPDK and OpenSSL.
build: $(LIBRARY) $(FUSE_LIBRARY) build/native/security.stamp $(if $(SPDK),$(SPDK_LIBRARY)) $(FAULT_LIBRARY) ## libdlfs and what goes with it, into the package

# The slow part of lint runs next to the tests, at low priority, in the time that they wait; it is printed at the end.
test: lint-quick .venv/.extra build/nvmet/order ## everything: lint, then all tests
	@mkdir -p build
	@nice $(MAKE) --silent --jobs=$(JOBS) --keep-going lint-slow TIDY_NODES=50000 >build/lint.log 2>&1 & lint=$$!; \
	trap 'kill "$$lint" 2>/dev/null || true' EXIT; code=0; $(MAKE) pytest || code=$$?; \
	wait "$$lint" || code=$$?; cat build/lint.log; exit "$$code"

# The threads of OpenBLAS, of which no test has use, start with numpy: a tenth of the CPU time of each command that is tested.
pytest: export OPENBLAS_NUM_THREADS := 1
# Several processes would each compile the same tests at once: a third of a minute of CPU time each, where one needs half.
pytest:
	$(if $(filter-out 0 1,$(WORKERS)),@mkdir -p build && $(BIN)/pytest --collect-only -qq -p no:syrupy $(PYTEST_ARGS) >build/collected.log || \
	    { cat build/collected.log; exit 1; })
	$(BIN)/pytest --numprocesses $(WORKERS) --max-worker-restart 0 $(PYTEST_ARGS)

# They take a minute of CPU time, most of it for importing PyTorch, for which CI has no room: make test runs two of them.
test-examples: build .venv/.extra ## every program and notebook of examples/; PACKAGES="torch torchvision nbclient ipykernel"
	DLFS_EXAMPLES=all $(BIN)/pytest tests/examples $(PYTEST_ARGS)

# They start Slurm clusters, whose time-outs are seconds: minutes, for which CI has no room.
test-slurm: export OPENBLAS_NUM_THREADS := 1
test-slurm: build .venv/.extra ## jobs on a real Slurm cluster in network namespaces, as root; PACKAGES="torch"
	$(call apt,$(APT_SLURM))
	DLFS_REQUIRE="$${DLFS_REQUIRE-fuse,root,slurm}" DLFS_SLURM=1 $(BIN)/pytest -m slurm tests/slurm $(PYTEST_ARGS)

# They run containers of the image: minutes, for which CI has no room.
test-containers: build .venv/.extra build/image/dlfs.tar ## the image, and containers with mounts, services and limits, by podman as root
	$(call apt,$(APT_CONTAINERS))
	@$(PIP_INSTALL) kubernetes-validate
	DLFS_REQUIRE="$${DLFS_REQUIRE-containers,fuse,root}" DLFS_CONTAINERS=$(CURDIR)/build/image/dlfs.tar \
	    $(BIN)/pytest tests/containers tests/kubernetes/test_manifests.py $(PYTEST_ARGS)

# They start hubs, servers, browsers and a Slurm cluster: minutes, for which CI has no room. All users of the machine must be
# able to run HUB_PYTHON, as users' servers do.
test-jupyterhub: build build/jupyterhub/.stamp ## JupyterHub with local servers, jobs of Slurm and a browser, as root
	DLFS_REQUIRE="$${DLFS_REQUIRE-jupyterhub,root}" DLFS_JUPYTERHUB=1 \
	    build/jupyterhub/venv/bin/python -m pytest -p no:cacheprovider tests/jupyterhub $(PYTEST_ARGS)

demo: build .venv/.extra ## real images: import, verify, mount, train
	$(BIN)/python -m examples.demo $(DEMO_ARGS)

lint: lint-quick ## ruff, mypy, import-linter, clang-format, clang-tidy
	@$(MAKE) --silent --jobs=$(JOBS) lint-slow

lint-quick: build .venv/.packages-test
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	@echo lint-imports; $(BIN)/lint-imports --no-logo >build/imports.log || { cat build/imports.log; exit 1; }
	@echo clang-format; $(BIN)/clang-format --style=file:native/.clang-format --dry-run -Werror $(C_FILES)

# mypy and clang-tidy: minutes.
lint-slow: mypy $(TIDY)

mypy:
	$(BIN)/mypy

format: setup ## rewrite Python and C files in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/clang-format --style=file:native/.clang-format -i $(C_FILES)

bench: build build/bench/.stamp ## measure everything and report: see bench/README.md
	build/bench/venv/bin/python -m bench report $(BENCH_ARGS)

bench-dlio: build build/dlio/.stamp ## DLIO on ext4, on the mount and through the sample API
	$(BIN)/python -m bench.dlio $(BENCH_ARGS)

docs: setup ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo build/site/index.html

wheel: setup ## a wheel in dist/, tried in a virtual environment of its own
	@rm -rf build/wheel && mkdir -p build/wheel dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	@$(PYTHON) -m venv --without-pip build/wheel/venv
	@wheel=$$(ls build/wheel/*.whl) && CC=false CXX=false \
	    $(BIN)/python -m pip --python build/wheel/venv/bin/python install --quiet --no-compile "$$wheel[mount]"
	@cd build/wheel && export PATH="$$PWD/venv/bin:$$PATH" PYTHONSAFEPATH=1 && mkdir source mnt && \
	    echo "it works" >source/sample && dlfs version && dlfs import --help >help && dlfs format volume.img --size 16MiB && \
	    dlfs import source volume.img --name trial && dlfs ls volume.img trial && \
	    dlfs cat volume.img trial sample | diff - source/sample && \
	    if [ -w /dev/fuse ]; then \
	        dlfs mount volume.img mnt && trap 'dlfs umount mnt' EXIT && diff mnt/trial/sample source/sample; fi
	@cp build/wheel/*.whl dist/ && ls dist/*.whl

# By debootstrap, buildah and the network, as root: a minute or two.
image: build/image/dlfs.tar ## the container images for podman load, and the lists of their parts, in build/image

release: build/release/.stamp ## the source distribution and the wheels of a release, in dist/release
	build/release/venv/bin/python -m deploy.release.build

# Not a part of .ci/run: it fetches a compiler of 500 MB and compiles the library for each Python: 11 minutes of CPU time for three.
release-check: release ## these packages in clean environments of all Pythons on PATH, with the README's examples
	build/release/venv/bin/python -m deploy.release.check $(PACKAGES)

clean: ## remove what was built, and the virtual environment
	rm -rf build dist .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(LIBRARY) $(FUSE_LIBRARY) $(SECURITY_LIBRARY) $(SPDK_LIBRARY)

# ---- stamps ----

# apt,PAIRS: install the missing packages of PAIRS and those of a virtual environment, or print the command and stop.
define apt
@missing=""; \
for pair in $(1); do command -v "$${pair%%:*}" >/dev/null || [ -r "$${pair%%:*}" ] || missing+=" $${pair##*:}"; done; \
if ! command -v $(PYTHON) >/dev/null; then missing+=" python3 python3-venv python3-dev"; else \
    $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing+=" $(notdir $(PYTHON))-venv"; \
    $(PYTHON) -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' \
        2>/dev/null || missing+=" $(notdir $(PYTHON))-dev"; \
fi; \
if [ -z "$$missing" ]; then exit 0; fi; \
if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
    echo "Installing Debian packages:$$missing"; \
    export DEBIAN_FRONTEND=noninteractive; \
    apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing </dev/null >/dev/null; \
else \
    echo "Some packages are missing. Please run this, then make again:"; \
    echo "    sudo apt-get install -y --no-install-recommends$$missing"; \
    exit 1; \
fi
endef

.venv/.packages:
	$(call apt,$(APT_BUILD) $(if $(filter test lint,$(MAKECMDGOALS)),$(APT_TEST)))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "DLFS needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	    echo "Name another one with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@mkdir -p .venv && touch $@

.venv/.packages-test: Makefile | .venv/.packages
	$(call apt,$(APT_TEST))
	@touch $@

# An older pip works as well: it downloads whole packages to read what they need, and takes twice the time.
.venv/.stamp: pyproject.toml .venv/.packages
	@[ -x $(BIN)/python ] || { echo "Making the virtual environment .venv"; $(PYTHON) -m venv .venv; }
	@echo "Installing Python packages into .venv"
	@$(PIP_INSTALL) --upgrade pip || true
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

.venv/.extra: .venv/.stamp
	@[ -z "$(PACKAGES)" ] || $(PIP_INSTALL) $(PACKAGES)

# The peers of the benchmark, pinned, in a virtual environment of their own. The report names those that are missing.
build/bench/.stamp: pyproject.toml .venv/.stamp
	@missing=""; for pair in $(APT_BENCH); do \
	    command -v "$${pair%%:*}" >/dev/null || [ -r "$${pair%%:*}" ] || missing+=" $${pair##*:}"; done; \
	if [ -n "$$missing" ]; then echo "The report will lack what these Debian packages are for:$$missing"; fi
	@echo "Installing the peers of the benchmark into build/bench/venv"
	@[ -x build/bench/venv/bin/python ] || $(PYTHON) -m venv build/bench/venv
	@build/bench/venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[peers]' $(PACKAGES)
	@touch $@

# The compiler of the wheels, and the tools that check them.
build/release/.stamp: pyproject.toml .venv/.stamp
	$(call apt,$(APT_RELEASE))
	@echo "Installing the tools of a release into build/release/venv"
	@[ -x build/release/venv/bin/python ] || $(PYTHON) -m venv build/release/venv
	@build/release/venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[release]'
	@touch $@

build/image/base.tar: deploy/image/base.sh | .venv/.stamp
	$(call apt,$(APT_IMAGE))
	@mkdir -p $(@D)
	deploy/image/base.sh $@.new && mv $@.new $@

build/image/dlfs.tar: build/image/base.tar $(wildcard deploy/image/* deploy/kubernetes/csi/* deploy/kubernetes/csi/dlfs_csi/*) $(LIBRARY) $(FUSE_LIBRARY) $(shell find dlfs -name '*.py')
	@$(MAKE) wheel >build/image/wheel.log || { cat build/image/wheel.log; exit 1; }
	deploy/image/build.sh "$$(ls -t dist/*.whl | head -1)" $< $(@D) dlfs-csi dlfs

# A hub, its proxy and its spawners, in folders of their own.
build/jupyterhub/.stamp: pyproject.toml | .venv/.packages
	$(call apt,$(APT_JUPYTERHUB))
	@echo "Installing JupyterHub into build/jupyterhub"
	@[ -x build/jupyterhub/venv/bin/python ] || $(HUB_PYTHON) -m venv build/jupyterhub/venv
	@build/jupyterhub/venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[jupyterhub]'
	@npm install --silent --no-fund --no-audit --prefix build/jupyterhub configurable-http-proxy@5
	@touch $@

# The kernel that the tests run in QEMU. Without it they are skipped, and CI fails.
build/nvmet/order: tests/nvmet/kernel.py | .venv/.stamp
	@echo "Fetching a kernel for the tests in QEMU"
	@$(BIN)/python -m tests.nvmet.kernel || true

# DLIO and its frameworks, in a virtual environment of their own.
build/dlio/.stamp: bench/dlio/requirements.txt bench/dlio/requirements-no-deps.txt | .venv/.stamp
	$(call apt,$(APT_DLIO))
	@echo "Installing DLIO, PyTorch and TensorFlow into build/dlio/venv: 2.5 GiB"
	@[ -x build/dlio/venv/bin/python ] || $(PYTHON) -m venv build/dlio/venv
	@build/dlio/venv/bin/python -m pip install --quiet --disable-pip-version-check -r $(word 1,$^)
	@build/dlio/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(word 2,$^)
	@touch $@

# Copied and renamed, so that a process that has mapped the old library keeps it.
$(LIBRARY): .venv/.stamp $(NATIVE)
	@echo "Building libdlfs"
	@$(CMAKE) -S native -B build/native --log-level=WARNING -DCMAKE_BUILD_TYPE=Release -DDLFS_TESTS=OFF \
	    -DDLFS_SPDK=$(if $(SPDK),ON,OFF) >/dev/null
	@$(CMAKE) --build build/native --target dlfs --parallel $(JOBS) >build/native/make.log || { cat build/native/make.log; exit 1; }
	@cp build/native/libdlfs.so $@.new && mv $@.new $@

$(FUSE_LIBRARY): $(LIBRARY) $(wildcard native/fuse/* native/fuse/*/*)
	@echo "Building libdlfs_fuse"
	@$(CMAKE) -S native -B build/native --log-level=WARNING >/dev/null
	@$(CMAKE) --build build/native --target dlfs_fuse --parallel $(JOBS) >build/native/fuse.log || { cat build/native/fuse.log; exit 1; }
	@cp build/native/fuse/libdlfs_fuse.so $@.new && mv $@.new $@

build/native/security.stamp: $(LIBRARY) native/src/nvme/security/security.h $(wildcard native/src/security/*)
	@rm -f $(SECURITY_LIBRARY)
	@if [ -n "$$($(HAS_OPENSSL))" ]; then echo "Building libdlfs_security"; \
	$(CMAKE) -S native -B build/native --log-level=WARNING -DDLFS_SECURITY=ON >/dev/null; \
	$(CMAKE) --build build/native --target dlfs_security --parallel $(JOBS) >build/native/security.log || { cat build/native/security.log; exit 1; }; \
	cp build/native/src/security/libdlfs_security.so $(SECURITY_LIBRARY).new && mv $(SECURITY_LIBRARY).new $(SECURITY_LIBRARY); fi
	@touch $@

# Devices that fail on purpose, for the Python tests: in no package.
$(FAULT_LIBRARY): $(LIBRARY) $(wildcard native/tests/fault/*) native/tests/CMakeLists.txt
	@$(CMAKE) -S native -B build/native --log-level=WARNING -DDLFS_TESTS=ON >/dev/null
	@$(CMAKE) --build build/native --target dlfs_fault --parallel $(JOBS) >build/native/fault.log || { cat build/native/fault.log; exit 1; }
	@touch $@

$(SPDK_LIBRARY): $(LIBRARY) $(wildcard native/spdk/*)
	@echo "Building libdlfs_spdk"
	@$(CMAKE) -S native -B build/native --log-level=WARNING -DDLFS_SPDK=ON >/dev/null
	@$(CMAKE) --build build/native --target dlfs_spdk --parallel $(JOBS) >build/native/spdk.log || { cat build/native/spdk.log; exit 1; }
	@cp build/native/spdk/libdlfs_spdk.so $@.new && mv $@.new $@

$(TIDY_FOLDER)/%.ok: native/%.c $(wildcard native/src/*/*.h native/src/*/*/*.h native/fuse/*.h native/fuse/*/*.h native/spdk/*.h native/include/dlfs/*.h) native/.clang-tidy
	@mkdir -p $(@D)
	@echo "clang-tidy $<"; clang-tidy --quiet -p build/native $< 2>/dev/null \
	    $(addprefix --extra-arg=,-Xclang -analyzer-config -Xclang max-nodes=$(TIDY_NODES))
	@touch $@
