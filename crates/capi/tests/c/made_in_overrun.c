// A completion queue overruns while a thread makes queue pairs that use it, and another reads the events of their failure.
// An event of a queue pair that has not been returned yet is nobody's: no destroy waits for its acknowledgement.
#include "check.h"
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define ROUNDS 4000
#define MOST 24

static struct ibv_context *context;
static struct end sender;
static atomic_int round_of_sends, sent;

static void *read_events(void *unused)
{
	struct ibv_async_event event;
	(void)unused;
	while (sent < ROUNDS) {
		while (ibv_get_async_event(context, &event) == 0) {
			TRUE(event.element.qp != NULL);
			ibv_ack_async_event(&event);
		}
		sched_yield();
	}
	return NULL;
}

static void *send_too_much(void *unused)
{
	(void)unused;
	for (int round = 1; round <= ROUNDS; round++) {
		while (round_of_sends < round)
			sched_yield();
		for (int i = 0; i < 4; i++)
			post_send(&sender, i, 8, IBV_SEND_SIGNALED);
		sent = round;
	}
	return NULL;
}

int main(void)
{
	context = open_device();
	OK(fcntl(context->async_fd, F_SETFL, O_NONBLOCK));
	struct ibv_pd *pd = ibv_alloc_pd(context);
	pthread_t threads[2];
	OK(pthread_create(&threads[0], NULL, read_events, NULL));
	OK(pthread_create(&threads[1], NULL, send_too_much, NULL));
	for (int round = 1; round <= ROUNDS; round++) {
		struct end receiver = make_end(pd, IBV_QPT_RC);
		struct ibv_cq *small = ibv_create_cq(context, 1, NULL, NULL, 0);
		struct ibv_qp *made[MOST];
		int count = 0;
		sender = make_end(pd, IBV_QPT_RC);
		OK(ibv_destroy_qp(receiver.qp));
		receiver.qp = make_qp(pd, small, IBV_QPT_RC, NULL, 0);
		connect_ends(&sender, &receiver);
		for (int i = 0; i < 4; i++)
			OK(post_recv(&receiver, i, 64));
		round_of_sends = round;
		while (count < MOST && sent < round) {
			made[count] = make_qp(pd, small, IBV_QPT_RC, NULL, 0);
			count++;
		}
		while (sent < round)
			sched_yield();
		while (count > 0)
			OK(ibv_destroy_qp(made[--count]));
		free_end(&sender);
		free_end(&receiver);
		OK(ibv_destroy_cq(small));
	}
	for (int i = 0; i < 2; i++)
		OK(pthread_join(threads[i], NULL));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(context));
	return 0;
}
