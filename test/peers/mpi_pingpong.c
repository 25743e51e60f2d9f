/* Time of one way of a message between two ranks by MPI_Send and MPI_Recv, as test/perf p2p measures it, for its -peer.
 *
 * mpicc -O2 -o mpi_pingpong test/peers/mpi_pingpong.c && mpirun -n 2 --oversubscribe --bind-to none ./mpi_pingpong
 * SIZE...
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
	int me;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &me);
	for (int arg = 1; arg < argc; arg++) {
		long n = atol(argv[arg]);
		int turns = n <= 1 << 20 ? 300 : 30;
		char *out = calloc(1, (size_t)n + 1), *into = calloc(1, (size_t)n + 1);
		double *us = malloc(sizeof(double) * (size_t)turns);
		for (int turn = -10; turn < turns; turn++) {
			double start = MPI_Wtime();
			if (me == 0)
				MPI_Send(out, (int)n, MPI_BYTE, 1, 1, MPI_COMM_WORLD);
			MPI_Recv(into, (int)n, MPI_BYTE, 1 - me, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			if (me == 1)
				MPI_Send(out, (int)n, MPI_BYTE, 0, 1, MPI_COMM_WORLD);
			if (turn >= 0)
				us[turn] = (MPI_Wtime() - start) * 1e6 / 2;
		}
		qsort(us, (size_t)turns, sizeof(double), by_value);
		if (me == 0) {
			printf("%ld %.3f\n", n, us[turns / 2]);
			fflush(stdout);
		}
		free(out);
		free(into);
		free(us);
	}
	MPI_Finalize();
	return 0;
}
