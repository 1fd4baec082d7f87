/* One collective operation, timed on SimGrid's virtual clock; built and run by benchmarks/smpi.py. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int rank, count = atoi(argv[2]) / 4;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  float *a = SMPI_SHARED_MALLOC(4 * (size_t)count), *b = SMPI_SHARED_MALLOC(4 * (size_t)count);
  double began = MPI_Wtime(), took, most;
  if (!strcmp(argv[1], "allreduce"))
    MPI_Allreduce(a, b, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  else if (!strcmp(argv[1], "broadcast"))
    MPI_Bcast(a, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
  else
    MPI_Reduce(a, b, count, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
  took = MPI_Wtime() - began;
  MPI_Reduce(&took, &most, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  if (rank == 0)
    printf("seconds %.9f\n", most);
  MPI_Finalize();
  return 0;
}
