"""Start MPI, reject a wrong launch, and abort the job on an uncaught exception."""
