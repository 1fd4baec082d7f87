"""Spack package; `packaging/README.md` has the commands."""

from pathlib import Path

from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyUnisono(PythonPackage):
    """Collective training over MPI for Python."""

    # This checkout, as the project has no public archive.
    git = f"file://{Path(__file__).resolve().parents[4]}"

    license("Apache-2.0")

    version("0.1.0", branch="main")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    # The MPI library that the cluster names in packages.yaml.
    depends_on("mpi", type="run")
    depends_on("py-numpy@1.26:", type="run")
    depends_on("py-mpi4py@4.1.1:", type="run")
    depends_on("py-llvmlite@0.45:", type="run")
    depends_on("py-ml-dtypes@0.5:", type="run")
    depends_on("py-msgpack@1.0.8:", type="run")
    depends_on("py-safetensors@0.7:", type="run")
    depends_on("py-google-crc32c@1.5:", type="run")
    depends_on("py-array-api-compat@1.9:", type="run")
    depends_on("py-tqdm@4.66:", type="run")
    depends_on("py-numba@0.62:", type="run")

    import_modules = ["collectives", "strategies"]
