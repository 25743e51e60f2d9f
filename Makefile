# The project's verbs. Every one works on a machine without a GPU and without a CUDA toolkit.
GO ?= go
PYTHON ?= python3
VENV := .venv

# The oldest torch that the Python package supports. The newest is what the index has.
OLDEST_TORCH := 2.8.0

# CUDA C++, C++ and C. What is generated is in .clang-format-ignore.
C_SOURCES = $(shell git ls-files '*.cu' '*.cuh' '*.cpp' '*.h' '*.c')

# Modules of their own, so that the library does not need what they do.
MODULES := observe/prom observe/otel

.PHONY: build check test modules race bench kernels python python-torch torch-venv torch-pages torch-tests python-company deep-ep deep-ep-tests deep-ep-hosts gpu package release release-trial image docs screenshot site lint fmt

build:
	$(GO) build ./...
	CGO_ENABLED=0 $(GO) build ./...
	for m in $(MODULES); do (cd $$m && $(GO) build ./...) || exit 1; done

# Everything that can be checked without a GPU, an hour on 2 idle cores.
check:
	bash .ci/full

# Eight minutes; with -short two and a half.
test:
	$(GO) test ./...
	$(MAKE) modules

# Tests of the modules, a few seconds after the build of what they need.
modules:
	for m in $(MODULES); do (cd $$m && $(GO) test -race ./...) || exit 1; done

race:
	$(GO) test -race ./...

bench:
	$(GO) run ./test/perf all -o bench -python $(or $(wildcard $(VENV)-torch/bin/python),$(PYTHON))

# Rebuilds what is generated and committed: the layouts that kernels and Go share, and the fatbins. Needs nvcc, or PyPI to fetch it from.
kernels:
	$(GO) run ./kernels/cuda/internal/genlayout
	$(GO) run ./kernels/cuda/internal/genfatbin

# Builds and installs the Python package into .venv and runs its tests. Those that need torch are skipped without it.
python: $(VENV)/ready
	CC=$$(command -v cc || true) $(VENV)/bin/pip install --quiet --disable-pip-version-check ./bindings/python
	cd bindings/python && ../../$(VENV)/bin/python -m pytest -q

# The package's tests with the oldest torch that it supports and then with the newest, which stays in .venv-torch, or with TORCH=oldest or newest
# alone; TESTS names files of tests to run no others. Some 6 GB to fetch; one torch at a time is on the disk, and 10 GB are enough. What torch-venv has made before is used once, so that the
# newest torch is that of the day.
python-torch: $(VENV)/ready
	for torch in $(or $(TORCH),oldest newest); do \
		[ "$$(cat $(VENV)-torch/fresh 2>/dev/null)" = $$torch ] || $(MAKE) torch-venv TORCH=$$torch || exit 1; \
		rm $(VENV)-torch/fresh && \
		CC=$$(command -v cc || true) $(VENV)-torch/bin/pip install --quiet --disable-pip-version-check ./bindings/python && \
		$(VENV)-torch/bin/python -c 'import torch; print("torch", torch.__version__)' && \
		(cd bindings/python && ../../$(VENV)-torch/bin/python -m pytest -q $(TESTS)) || exit 1; \
	done

# The environment that python-torch needs, for TORCH=oldest or newest. uv keeps what it has fetched and unpacked in its cache and links to it.
torch-venv: $(VENV)/ready
	rm -rf $(VENV)-torch && $(VENV)/bin/uv venv --quiet --seed --python $(PYTHON) $(VENV)-torch
	$(VENV)/bin/uv pip install --quiet --python $(VENV)-torch/bin/python \
		$(if $(filter oldest,$(TORCH)),torch==$(OLDEST_TORCH),torch) -r bindings/python/requirements-dev.txt
	echo $(TORCH) >$(VENV)-torch/fresh

# The commands of the pages that need torch, with the one that is in .venv-torch. Each torchrun looks for a free port.
torch-pages:
	$(GO) build -o bin/ ./examples/worker
	. $(VENV)-torch/bin/activate && export PET_STANDALONE=1 && set -ex && \
	pip install ./bindings/python && \
	torchrun --nproc-per-node 2 examples/quickstart/quickstart.py && \
	torchrun --nproc-per-node 2 examples/quickstart/layer.py && \
	torchrun --nproc-per-node 2 examples/symmetric/persistent.py --order other && \
	torchrun --nproc-per-node 4 --no-python bin/worker

# torch's own tests of the backend's calls, on the CPU, with the torch that is in .venv-torch, with 2, 3 and 4 ranks.
torch-tests:
	CC=$$(command -v cc || true) $(VENV)-torch/bin/pip install --quiet --disable-pip-version-check ./bindings/python expecttest
	for n in 2 3 4; do \
		WORLD_SIZE=$$n $(VENV)-torch/bin/python bindings/python/tests/torchs_own.py >$(VENV)-torch/own.log 2>&1 || { cat $(VENV)-torch/own.log; exit 1; }; \
		echo "$$n ranks: $$(tail -n 3 $(VENV)-torch/own.log)"; \
	done

# The package next to FlashInfer, NCCL EP, xformers, numba and cupy, imported before it and after it, as far as they have packages and can be
# imported here. Some 8 GB to fetch.
python-company:
	rm -rf $(VENV)-company && $(PYTHON) -m venv $(VENV)-company
	$(VENV)-company/bin/pip install --quiet --disable-pip-version-check --no-cache-dir torch numpy
	CC=$$(command -v cc || true) $(VENV)-company/bin/pip install --quiet --disable-pip-version-check ./bindings/python
	$(VENV)-company/bin/python bindings/python/company.py

# The package deep_ep and its tests, with the torch that is in .venv-torch.
deep-ep:
	CC=$$(command -v cc || true) $(VENV)-torch/bin/pip install --quiet --disable-pip-version-check ./bindings/python
	$(VENV)-torch/bin/pip install --quiet --disable-pip-version-check --no-deps ./bindings/python/deep_ep
	$(VENV)-torch/bin/pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python -r bindings/python/deep_ep/tests/requirements.txt
	cd bindings/python/deep_ep && ../../../$(VENV)-torch/bin/python -m pytest -q

# DeepEP's own tests, unmodified, on the CPU: DEEPEP names a checkout of DeepEP 2.1. After make deep-ep.
deep-ep-tests:
	cd bindings/python/deep_ep && PYTHON=../../../$(VENV)-torch/bin/python ./tests/peer.sh "$(DEEPEP)"

# vLLM, SGLang and torchtitan over the package deep_ep, on the CPU, with the torch that is in .venv-torch. The first time it fetches their
# sources, 100 MB, into .hosts; it takes two minutes on 2 cores.
deep-ep-hosts:
	CC=$$(command -v cc || true) $(VENV)-torch/bin/pip install --quiet --disable-pip-version-check ./bindings/python
	$(VENV)-torch/bin/pip install --quiet --disable-pip-version-check --no-deps ./bindings/python/deep_ep
	$(VENV)-torch/bin/python bindings/python/deep_ep/tests/hosts/fetch.py .hosts
	cd bindings/python/deep_ep && SWITCHYARD_HOSTS=$(CURDIR)/.hosts ../../../$(VENV)-torch/bin/python -m pytest -q tests/hosts

# Builds everything that needs GPUs into the folder gpu, of at most 60 MB, for a machine with GPUs that has neither Go nor this repository.
# There, python3 gpu/run.py runs it, in 8 minutes on 2 GPUs. DEEPEP names a checkout of DeepEP 2.1, whose own tests then run too.
gpu: $(VENV)/ready
	CC=$$(command -v cc || true) GO=$(GO) $(VENV)/bin/python test/gpu/build.py gpu $(if $(DEEPEP),--deepep "$(DEEPEP)")

# Builds the sdist and the wheel into bindings/python/dist, checks them and installs each into a clean environment.
package: $(VENV)/ready
	$(VENV)/bin/python bindings/python/check_package.py bindings/python/dist

# The files of a release, from the commit that the version's tag names, into dist. Built twice in different folders, which must be the same to
# the byte.
release: $(VENV)/release
	$(VENV)/bin/python bindings/python/release.py dist --twice

# The files of a release from HEAD, built once.
release-trial: $(VENV)/release
	$(VENV)/bin/python bindings/python/release.py dist --trial

# Builds the image of examples/deploy by buildah, as root, and has it look at itself, run ranks and measure. Base images come from their
# registry, or BASES=debootstrap makes them of Debian's packages and this machine's Go.
image:
	$(GO) test ./test/deploy -run TestImage -count 1 -v -timeout 40m -image $(or $(BASES),pull)

$(VENV)/release: $(VENV)/ready bindings/python/requirements-release.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r bindings/python/requirements-release.txt
	touch $@

$(VENV)/ready: bindings/python/requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r bindings/python/requirements-dev.txt
	touch $@

# Writes into the pages what is made: code, pictures, the environment variables. Then builds the site.
docs:
	$(GO) run ./cmd/switchyard env -markdown >docs/environment.md
	$(GO) run ./test/docs/figures
	$(GO) run ./test/docs/pictures
	$(GO) test ./test/docs -run "Code|Promises|Floors|Launchers|Troubleshooting" -update
	$(MAKE) site

# Takes the picture of the page of switchyard top for the README, in Chromium, of a job that loses a rank and moves its experts.
screenshot:
	$(GO) run ./test/docs/screenshot

# Builds the pages as a web site into site, and tests it, in Chromium where that is installed.
site: $(VENV)/site
	$(VENV)/bin/python docs/site/build.py site
	$(VENV)/bin/python -m pytest -q docs/site

$(VENV)/site: $(VENV)/ready docs/site/requirements.txt
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r docs/site/requirements.txt
	touch $@

lint: $(VENV)/ready
	@out=$$(gofmt -l .); if [ -n "$$out" ]; then echo "gofmt: $$out"; exit 1; fi
	$(GO) vet ./...
	CGO_ENABLED=0 $(GO) vet ./...
	$(GO) tool staticcheck ./...
	check=$$($(GO) tool -n staticcheck); for m in $(MODULES); do \
		(cd $$m && $(GO) vet ./... && $$check ./...) || exit 1; \
	done
	cd bindings/python && ../../$(VENV)/bin/ruff check && ../../$(VENV)/bin/mypy
	$(VENV)/bin/ruff check --config bindings/python/pyproject.toml .ci docs/site test/gpu
	cd bindings/python/deep_ep && ../../../$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(C_SOURCES)

fmt: $(VENV)/ready
	gofmt -w .
	$(VENV)/bin/clang-format -i $(C_SOURCES)
