# Every target sets up .venv first if it is missing or out of date; once set up, none needs the network.
#   make demo    the main job: every strategy trains the same small GPT, and shows what it costs
#   make test    the tests, two files at a time
#   make learn   JupyterLab in chapters/
#   make book    the chapters as pages to read, out/book/index.html
#   make chapters   execute every chapter, as CI does (make notebooks: write their outputs anew)
#   make bench   our strategies timed beside torch's own
#   make lint    what continuous integration checks before the tests
#   make format  let ruff mend what it can
#   make clean   remove .venv and out/
#   make exercises   write exercises/ from solutions/
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: help setup demo test learn book exercises bench lint format clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(READY)

# requirements.txt comes first, and minidist itself with --no-deps, so that pip never replaces a
# tested version (an unpinned torch is several gigabytes). No build isolation: that would need the
# network again whenever pyproject.toml changes.
$(READY): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

demo: $(READY)
	@mkdir -p out
	$(BIN)/python -m minidist compare --plot out/compare.png --json out/compare.json

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

learn: $(READY)
	$(BIN)/python -m minidist learn

book: $(READY)
	$(BIN)/python -m sphinx -q -W --keep-going -c chapters/book -d out/book/.doctrees chapters out/book
	@echo out/book/index.html

exercises: $(READY)
	$(BIN)/python -m minidist.learn.strip

# Not part of `make test`: several minutes. The files stay as they are.
chapters: $(READY)
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=180 --timeout=600 chapters

notebooks: $(READY)
	$(BIN)/python .ci/notebooks

bench: $(READY)
	$(BIN)/python -m minidist bench

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv out
