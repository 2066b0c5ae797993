/*
 * A thread loads a library, whose constructor makes calls, while another thread makes calls as well. The loader's lock is held until
 * the constructor returns. A thread takes it at its first calls, and first polls, and not in its later ones.
 *
 *   loads_library LIBRARY first|later
 *
 * With LIBRARY defined it is such a library.
 */
#include "check.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <unistd.h>

/* The part that both have. */
struct shared {
	struct ibv_context *ctx;
	sem_t is_ready, is_loading;
	atomic_bool is_done, is_first;
};

#ifdef LIBRARY

extern struct shared shared;

__attribute__((constructor)) static void begin(void)
{
	double until = now() + 0.2;
	sem_post(&shared.is_loading);
	/* The first calls of the other thread may wait for the end of this function. */
	while (shared.is_first ? now() < until : !shared.is_done) {
		struct ibv_pd *pd = ibv_alloc_pd(shared.ctx);
		TRUE(pd != NULL);
		OK(ibv_dealloc_pd(pd));
	}
}

#else

#include <dlfcn.h>

struct shared shared;
static struct end a, b;

static void call(void)
{
	/* Longer than max_inline_data: the log tells of it, and a report with the names of functions and objects. */
	TRUE(post_send(&a, 1, 128, IBV_SEND_INLINE) != 0);
	struct ibv_pd *pd = ibv_alloc_pd(shared.ctx);
	TRUE(pd != NULL);
	OK(ibv_dealloc_pd(pd));
}

static void talk(void)
{
	OK(post_recv(&b, 1, 64));
	OK(post_send(&a, 1, 64, IBV_SEND_SIGNALED));
	EQ(poll_one(a.cq).status, 0);
	EQ(poll_one(b.cq).status, 0);
}

static void *work(void *unused)
{
	(void)unused;
	if (!shared.is_first)
		call();
	sem_post(&shared.is_ready);
	OK(sem_wait(&shared.is_loading));
	call();
	if (shared.is_first)
		talk();
	shared.is_done = true;
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t thread;
	alarm(20);
	TRUE(argc == 3);
	shared.is_first = strcmp(argv[2], "first") == 0;
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	shared.ctx = ctx;
	OK(sem_init(&shared.is_ready, 0, 0));
	OK(sem_init(&shared.is_loading, 0, 0));
	OK(pthread_create(&thread, NULL, work, NULL));
	OK(sem_wait(&shared.is_ready));
	TRUE(dlopen(argv[1], RTLD_NOW) != NULL);
	OK(pthread_join(thread, NULL));
	free_end(&a), free_end(&b);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}

#endif
