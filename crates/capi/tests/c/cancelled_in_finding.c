/* A thread is cancelled while it makes a mistake: the report is whole, and no other thread waits for it. */
#include "check.h"

#include <pthread.h>
#include <unistd.h>

static struct end a, b;

static void *mistake(void *unused)
{
	(void)unused;
	/* It ends at its next point of cancellation. */
	pthread_cancel(pthread_self());
	/* Longer than max_inline_data. */
	post_send(&a, 1, 128, IBV_SEND_INLINE);
	pthread_testcancel();
	fail_at(__FILE__, __LINE__, "the thread runs on", 0, 0);
	return NULL;
}

int main(void)
{
	struct ibv_wc wc;
	pthread_t thread;
	void *result;
	alarm(20);
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	OK(pthread_create(&thread, NULL, mistake, NULL));
	OK(pthread_join(thread, &result));
	TRUE(result == PTHREAD_CANCELED);
	EQ(ibv_poll_cq(a.cq, 1, &wc), 0);
	free_end(&a), free_end(&b);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
