"""Start MPI; refuse a wrong launch; end the job on an uncaught exception."""
