/* S1: what becomes of work when a queue pair goes. */
#include <poll.h>
#include <pthread.h>
#include <unistd.h>
#include "check.h"

/* S1.3: flush in posting order, and the "post one more and wait for it" drain. */
static void flush(struct ibv_pd *pd)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	for (int i = 0; i < 4; i++)
		OK(post_recv(&a, i, 16));
	to_err(a.qp);
	EQ(a.qp->state, IBV_QPS_ERR);
	for (int i = 0; i < 4; i++) {
		struct ibv_wc wc = poll_one(a.cq);
		EQ(wc.wr_id, i);
		EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
		EQ(wc.qp_num, a.qp->qp_num);
	}
	OK(post_send(&a, 50, 1, 0));
	OK(post_recv(&a, 51, 1));
	EQ(poll_one(a.cq).wr_id, 50);
	EQ(poll_one(a.cq).wr_id, 51);
	free_end(&a), free_end(&b);
}

/* S1.1, S1.2: completions that wait go with the queue pair; nothing comes after. */
static void purge(struct ibv_pd *pd)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	OK(post_recv(&b, 1, 16));
	to_err(b.qp);
	OK(ibv_destroy_qp(b.qp));
	struct ibv_wc wc;
	EQ(ibv_poll_cq(b.cq, 1, &wc), 0);
	b.qp = make_qp(pd, b.cq, IBV_QPT_RC, NULL, 0);
	/* A move to RESET does the same. */
	OK(post_recv(&a, 2, 16));
	to_err(a.qp);
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	OK(ibv_modify_qp(a.qp, &reset, IBV_QP_STATE));
	EQ(ibv_poll_cq(a.cq, 1, &wc), 0);
	free_end(&a), free_end(&b);
}

struct destroying {
	struct ibv_qp *qp;
	volatile int done;
};

static void *destroy(void *arg)
{
	struct destroying *d = arg;
	OK(ibv_destroy_qp(d->qp));
	d->done = 1;
	return NULL;
}

/* S1.4, S1.6: the event is raised once, and holds the queue pair until it is acknowledged. */
static void last_wqe(struct ibv_pd *pd)
{
	struct ibv_srq_init_attr si = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &si);
	struct ibv_cq *cq = ibv_create_cq(pd->context, 8, NULL, NULL, 0);
	struct ibv_qp *qp = make_qp(pd, cq, IBV_QPT_RC, srq, 0);
	to_init(qp);
	to_rtr(qp, qp->qp_num);
	to_err(qp);
	struct pollfd pfd = { .fd = pd->context->async_fd, .events = POLLIN };
	EQ(poll(&pfd, 1, 5000), 1);
	struct ibv_async_event event;
	OK(ibv_get_async_event(pd->context, &event));
	EQ(event.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
	TRUE(event.element.qp == qp);
	EQ(poll(&pfd, 1, 0), 0);

	struct destroying d = { .qp = qp };
	pthread_t thread;
	OK(pthread_create(&thread, NULL, destroy, &d));
	usleep(100000);
	EQ(d.done, 0);
	ibv_ack_async_event(&event);
	OK(pthread_join(thread, NULL));
	EQ(d.done, 1);
	OK(ibv_destroy_srq(srq));
	OK(ibv_destroy_cq(cq));
}

/* S1.6 for completion events. */
static void *destroy_cq(void *arg)
{
	OK(ibv_destroy_cq(arg));
	return NULL;
}

static void completion_event(struct ibv_pd *pd)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(pd->context);
	int cookie;
	struct end a = make_end(pd, IBV_QPT_RC);
	OK(ibv_destroy_qp(a.qp));
	OK(ibv_destroy_cq(a.cq));
	a.cq = ibv_create_cq(pd->context, 8, &cookie, channel, 0);
	a.qp = make_qp(pd, a.cq, IBV_QPT_RC, NULL, 0);
	OK(ibv_req_notify_cq(a.cq, 0));
	to_init(a.qp);
	OK(post_recv(&a, 1, 16));
	to_err(a.qp);
	struct pollfd pfd = { .fd = channel->fd, .events = POLLIN };
	EQ(poll(&pfd, 1, 5000), 1);
	struct ibv_cq *cq = NULL;
	void *context = NULL;
	OK(ibv_get_cq_event(channel, &cq, &context));
	TRUE(cq == a.cq && context == &cookie);
	EQ(poll(&pfd, 1, 0), 0);
	OK(ibv_destroy_qp(a.qp));
	pthread_t thread;
	OK(pthread_create(&thread, NULL, destroy_cq, a.cq));
	usleep(100000);
	EQ(pthread_tryjoin_np(thread, NULL), EBUSY);
	ibv_ack_cq_events(cq, 1);
	OK(pthread_join(thread, NULL));
	OK(ibv_destroy_comp_channel(channel));
	OK(ibv_dereg_mr(a.mr));
	free(a.buf);
}

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	flush(pd);
	purge(pd);
	last_wqe(pd);
	completion_event(pd);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
