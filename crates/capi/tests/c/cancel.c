/* Programs cancel the threads that serve their completions (rping does): wherever that hits them, the device goes on. */
#include "check.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

struct server {
	struct end *end;
	struct ibv_comp_channel *channel;
};

/* As the event threads of programs are: waits, polls, posts. */
static void *serve(void *arg)
{
	struct server *s = arg;
	struct ibv_cq *cq;
	void *context;
	struct ibv_wc wc;
	for (uint64_t id = 0;; id++) {
		if (ibv_get_cq_event(s->channel, &cq, &context))
			break;
		ibv_ack_cq_events(cq, 1);
		ibv_req_notify_cq(cq, 0);
		while (ibv_poll_cq(cq, 1, &wc) == 1)
			if (wc.opcode & IBV_WC_RECV) {
				post_recv(s->end, id, 64);
				post_send(s->end, id, 64, IBV_SEND_SIGNALED);
			}
	}
	return NULL;
}

static int open_descriptors(void)
{
	int n = 0;
	for (int fd = 0; fd < 1024; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

int main(void)
{
	/* Through the sockets, as between two hosts. */
	setenv("ANYVERBS_INPROC", "false", 1);
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	int before = 0;
	for (int round = 0; round < 300; round++) {
		struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
		struct server s = { &b, ibv_create_comp_channel(ctx) };
		OK(ibv_destroy_qp(b.qp));
		OK(ibv_destroy_cq(b.cq));
		b.cq = ibv_create_cq(ctx, 32, NULL, s.channel, 0);
		b.qp = make_qp(pd, b.cq, IBV_QPT_RC, NULL, 0);
		connect_ends(&a, &b);
		for (int i = 0; i < 4; i++) {
			OK(post_recv(&a, i, 64));
			OK(post_recv(&b, i, 64));
		}
		OK(ibv_req_notify_cq(b.cq, 0));
		pthread_t thread;
		OK(pthread_create(&thread, NULL, serve, &s));
		for (int i = 0; i < 4; i++)
			OK(post_send(&a, i, 64, IBV_SEND_SIGNALED));
		usleep(round * 13 % 500);
		void *result;
		OK(pthread_cancel(thread));
		OK(pthread_join(thread, &result));
		TRUE(result == PTHREAD_CANCELED);
		/* Everything still works, and nothing was lost with the thread. */
		for (int i = 0; i < 4; i++)
			EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
		OK(ibv_destroy_qp(b.qp));
		OK(ibv_dereg_mr(b.mr));
		OK(ibv_destroy_qp(a.qp));
		OK(ibv_dereg_mr(a.mr));
		OK(ibv_destroy_cq(a.cq));
		free(a.buf), free(b.buf);
		/* An event may have been read and not acknowledged: that is the program's. */
		ibv_ack_cq_events(b.cq, 1);
		OK(ibv_destroy_cq(b.cq));
		OK(ibv_destroy_comp_channel(s.channel));
		if (round == 10)
			before = open_descriptors();
	}
	/* The last holder of a channel may be a thread that receives, which closes it a little later. */
	for (int i = 0; i < 1000 && open_descriptors() > before; i++)
		usleep(10000);
	/* Less is no leak: at the tenth round the device may still have been looking for its neighbours. */
	TRUE(open_descriptors() <= before);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
