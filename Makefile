# make demo    trains with AdamW, optax.contrib.muon and dmuon (about 5 minutes)
# make test    runs the tests
# make test-oldest    the same with the oldest versions that are allowed, in .venv-oldest
# make bench   times the optimizers' updates
# make check   checks style and types
# make test-cuda PYTHON=python3.12 VENV=.venv-cuda    compiles for GPUs without one
#
# Each makes its own environment in .venv first. PYTHON=python3.12 chooses the Python,
# VENV=folder the environment, CONSTRAINTS=file the versions in it; ARGS="..." is handed on
# to the program.

VENV ?= .venv
ARGS ?=
CONSTRAINTS ?=
export JAX_PLATFORMS = cpu

in_venv = $(VENV)/bin/python
install = $(in_venv) -m pip install --quiet --disable-pip-version-check

# An environment that was made by another Python than the one named now is made again.
ifdef PYTHON
ifneq ($(PYTHON),$(shell cat $(VENV)/made-by 2>/dev/null))
again = again
endif
endif

.PHONY: demo test test-oldest test-cuda bench check environment clean again
.DELETE_ON_ERROR:

demo: $(VENV)/has-demo
	$(in_venv) -m dmuon_jax.demo $(ARGS)

test: $(VENV)/has-test
	$(in_venv) -m pytest -m "not slow and not cuda_compile" -n 2 --dist loadfile $(ARGS)

bench: $(VENV)/has-demo
	$(in_venv) bench/bench_update.py $(ARGS)

# The oldest jax is for Python 3.11.
test-oldest:
	$(MAKE) test VENV=.venv-oldest PYTHON=$$(.ci/find-python 3.11) CONSTRAINTS=.ci/oldest.txt

# Compiles every GPU kernel and whole steps for GPUs that are not there. Needs Python 3.12
# and about 5 GB for the CUDA wheels.
test-cuda: $(VENV)/has-test
	$(install) "jax[cuda13]" nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	$(in_venv) -m pytest -m cuda_compile $(ARGS)

check: $(VENV)/has-check
	$(in_venv) -m ruff check dmuon_jax tests bench notebooks $(ARGS)
	$(in_venv) -m pyright --pythonpath $(in_venv)

environment: $(VENV)/has-test

clean:
	rm -rf $(VENV)

$(VENV)/made-by: $(again)
	@python="$(PYTHON)"; [ -n "$$python" ] || python=$$(.ci/find-python) || exit 1; \
	"$$python" -c "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))" \
	|| { echo "PYTHON must name a Python >= 3.11 with venv, got $$python." >&2; exit 1; }; \
	echo "Making $(VENV) with $$("$$python" --version) ($$python)"; \
	"$$python" -m venv --clear $(VENV) && echo "$$python" > $@

$(VENV)/has-demo $(VENV)/has-test: $(VENV)/has-%: $(VENV)/made-by pyproject.toml
	@echo "Installing dmuon_jax and what its $* needs (a minute or two)"
	@$(install) -e ".[$*]" $(CONSTRAINTS:%=-c %)
	@touch $@

$(VENV)/has-check: $(VENV)/has-test
	@$(install) ruff "pyright[nodejs]"
	@touch $@
