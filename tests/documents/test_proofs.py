"""docs/proofs.md has a row for every page; tests and names that pages speak of are there."""

import re

from launcher import ROOT

DOCS = ROOT / "docs"
PAGE = (DOCS / "proofs.md").read_text()
ROWS = dict(re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \| (.+) \|$", PAGE, re.MULTILINE))


def test_every_page_has_a_row():
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    pages = {page for page in pages if not page.startswith("api/")}
    assert pages | {"api/index.rst", "api/messages.md"} == set(ROWS)


def test_what_is_named_is_there():
    for page, proof in ROWS.items():
        for name in re.findall(r"`((?:tests|benchmarks)[/\w.]*)`", proof):
            assert (ROOT / name).exists(), f"{page}: {name}"


def test_a_page_whose_examples_run_is_named_by_their_test():
    for page, proof in ROWS.items():
        if page.endswith(".rst") or page == "api/messages.md":
            continue
        if ">>> " in (DOCS / page).read_text() or proof.startswith(("program run", "all programs")):
            tests = re.findall(r"`(tests/[\w/]+/test_\w+\.py)`", proof)
            text = "".join((ROOT / name).read_text() for name in tests)
            assert page.rpartition("/")[2] in text, page


# Pages about other libraries, whose names they name.
OF_OTHERS = {
    "comparison.md", "frameworks.md", "from-tensorflow.md", "from-torch-distributed.md",
    "migrate-from-horovod.md", "sessions.md",
}  # fmt: skip

# What other pages name of MPI, CUDA, Slurm and libraries, or as an example.
NAMES_OF_OTHERS = {
    "BatchNormalization", "DataParallel", "DeprecationWarning", "LD_LIBRARY_PATH",
    "ModelParallel", "MPI_Comm_accept", "class_weight", "mean_with_sample_weight",
    "non_trainable_variables",
    "set_distribution", "weighted_metrics",
    "MPI_Comm_connect", "MPI_Comm_join", "MPI_Recv", "MPI_Send", "MPI_THREAD_MULTIPLE",
    "NCCL_DEBUG", "OMPI_MCA_btl_tcp_if_include", "PBS_NODEFILE", "PreemptParameters",
    "SLURM_NODEID", "SyncReplicasOptimizer", "THP_MEM_ALLOC_ENABLE", "TPU_VISIBLE_CHIPS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION", "_register_builtin_comm_hook", "apply_indexed_slices_grad",
    "ddp_backend", "exp_1", "send_user_signal", "test_model",
    "set_per_process_memory_fraction", "take_indexed_slices_grad", "TORCH_FR_BUFFER_SIZE",
    "batched_powerSGD_hook", "cluster_detection_method", "filter_jit", "process_index",
}  # fmt: skip


def test_what_pages_call_by_name_is_in_the_sources():
    folders = ("collectives", "strategies", "examples", "benchmarks", "slurm", "tests", ".ci")
    files = [path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]
    files = [path for path in files if path.suffix in ("", ".py", ".sbatch")]
    files += [ROOT / "Makefile", ROOT / "setup.cfg"]
    text = "".join(file.read_text() for file in files)
    known = {*re.findall(r"[A-Za-z_]\w*", text), *(file.stem for file in files)}
    unknown = []
    for page in DOCS.rglob("*.md"):
        name = str(page.relative_to(DOCS))
        if name in OF_OTHERS or name.startswith(("api/", "benchmarks/")):
            continue
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for code in re.findall(r"`([^`\n]+)`", prose):
            words = re.findall(r"[A-Za-z_]\w*", code)
            ours = [w for w in words if "_" in w.rstrip("_") or re.search("[a-z][A-Z]", w)]
            unknown += [(name, w) for w in ours if w not in known | NAMES_OF_OTHERS]
    assert sorted(set(unknown)) == []
