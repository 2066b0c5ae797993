/*
 * The first finding ends the program (--check=fatal), also while another thread waits in a read with the lock of its stream.
 *
 *   fatal_beside_reader alone|reads FILE
 */
#include "check.h"

#include <pthread.h>
#include <semaphore.h>
#include <unistd.h>

static sem_t has_lock;

static void *reader(void *arg)
{
	FILE *in = arg;
	flockfile(in);
	sem_post(&has_lock);
	/* Nobody writes. */
	getc_unlocked(in);
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t thread;
	int ends[2];
	alarm(20);
	TRUE(argc == 3);
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	FILE *file = fopen(argv[2], "w");
	TRUE(file != NULL);
	fputs("in the file", file);
	fputs("on standard output", stdout);
	if (strcmp(argv[1], "reads") == 0) {
		OK(pipe(ends));
		OK(sem_init(&has_lock, 0, 0));
		OK(pthread_create(&thread, NULL, reader, fdopen(ends[0], "r")));
		OK(sem_wait(&has_lock));
	}
	/* Longer than max_inline_data. */
	post_send(&a, 1, 128, IBV_SEND_INLINE);
	_exit(7);
}
